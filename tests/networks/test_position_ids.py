"""Position ids of one row: per-sample gradients are those of one backward pass per record."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleExpandedWeights
from torch import nn
from torch.nn import functional as F

from opacus_shuffle.networks.check import per_sample_check
from opacus_shuffle.networks.position_ids import prepare_model

VOCABULARY, LENGTH, RECORDS = 40, 6, 3


class Positions(nn.Module):
    """A block of its own that knows where the tokens are, as BERT has."""

    def __init__(self, *, width=4, length=8):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)

    def forward(self, tokens):
        return self.words(tokens) + self.places(torch.arange(tokens.shape[1])[None])


class Text(nn.Module):
    """The smallest model with the defect."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = Positions(), nn.Linear(4, 2)

    def forward(self, tokens, *, fail=None):
        hidden = self.embed(tokens)
        if fail is not None:
            raise fail
        return self.head(torch.tanh(hidden).mean(1))


def texts(records=RECORDS, length=LENGTH):
    return torch.randint(
        1, VOCABULARY, (records, length), generator=torch.Generator().manual_seed(3)
    )


def lookups(model, *args):
    """What each embedding of the model is asked for."""
    seen = {}
    handles = [
        module.register_forward_hook(
            lambda _, inputs, __, name=name: seen.update({name: tuple(inputs[0].shape)})
        )
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    ]
    model(*args)
    for handle in handles:
        handle.remove()
    return seen


def problem(model, records):
    """What the check says of a model on these records."""
    seen = per_sample_check(model, ((records,), {}))
    assert seen.seen
    return seen.problem


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
BERT = {
    **SIZES,
    "max_position_embeddings": 12,
    "intermediate_size": 24,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
CONFIGURATIONS = {
    "Bert": BERT,
    "Albert": {**BERT, "embedding_size": 8, "classifier_dropout_prob": 0.0},
    "Electra": {**BERT, "embedding_size": 8},
    "Roberta": BERT,
    "DistilBert": {
        **{"vocab_size": VOCABULARY, "max_position_embeddings": 12, "n_layers": 2, "n_heads": 2},
        **{"dim": 16, "hidden_dim": 24, "dropout": 0.0, "attention_dropout": 0.0},
        "seq_classif_dropout": 0.0,
    },
    "GPT2": {
        **{"vocab_size": VOCABULARY, "n_positions": 12, "n_embd": 16, "n_layer": 2, "n_head": 2},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1},
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    },
    "T5": {
        **{"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1},
        **{"num_heads": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0},
    },
}


def hugging_face(name):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    family = next(family for family in CONFIGURATIONS if name.startswith(family))
    configuration = getattr(transformers, f"{family}Config")(**CONFIGURATIONS[family])
    return getattr(transformers, name)(configuration).train()


def record_losses(model, tokens):
    """One loss per record: of the next tokens for language models, of the label for classifiers."""
    logits = model(tokens).logits
    if logits.dim() == 3:
        loss = F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
        return loss.mean(1)
    return F.cross_entropy(logits, tokens[:, 0] % 2, reduction="none")


def worst_relative_error(model, private, tokens):
    """Between Opacus's per-sample gradients and a loop over the records."""
    record_losses(private, tokens).sum().backward()
    computed = {name: p.grad_sample for name, p in model.named_parameters()}
    worst = 0.0
    for i in range(len(tokens)):
        names, parameters = zip(*model.named_parameters(), strict=True)
        loss = record_losses(model, tokens[i : i + 1]).sum()
        for name, gradient in zip(names, torch.autograd.grad(loss, parameters), strict=True):
            scale = max(float(gradient.abs().max()), 1e-3)
            worst = max(worst, float((computed[name][i] - gradient).abs().max()) / scale)
    return worst


CLASSIFIERS = [
    "BertForSequenceClassification",
    "DistilBertForSequenceClassification",
    "GPT2ForSequenceClassification",
]
OTHERS = ["AlbertForSequenceClassification", "ElectraForSequenceClassification"]
PLACES = {
    "Bert": "bert.embeddings.position_embeddings",
    "Dist": "distilbert.embeddings.position_embeddings",
    "GPT2": "transformer.wpe",
    "Albe": "albert.embeddings.position_embeddings",
    "Elec": "electra.embeddings.position_embeddings",
}


# WS Table IV, WS Table V: BERT, RoBERTa and GPT-2, small ones with random weights.
@pytest.mark.filterwarnings("ignore:In CPU autocast")
@pytest.mark.parametrize("force_functorch", [False, True], ids=["hooks", "functorch"])
@pytest.mark.parametrize("name", [*CLASSIFIERS, "GPT2LMHeadModel", *OTHERS])
def test_per_sample_gradients_are_those_of_a_loop_over_records(name, force_functorch):
    model = prepare_model(hugging_face(name).double())
    private = GradSampleModule(model, loss_reduction="sum", force_functorch=force_functorch)
    assert worst_relative_error(model, private, texts()) <= 1e-12


@pytest.mark.parametrize("name", [*CLASSIFIERS, "GPT2LMHeadModel", *OTHERS])
def test_the_defect_is_named_and_prepare_model_mends_it_without_changing_an_output(name):
    model, tokens = hugging_face(name), texts()
    before, place = model(tokens).logits, PLACES[name[:4]]
    assert re.search(
        rf"every batch, {place}, .*call opacus_shuffle.prepare_model\(model\)",
        problem(model, tokens),
    )
    assert prepare_model(model) is model
    assert not problem(model, tokens)
    assert lookups(model, tokens)[place] == tokens.shape
    assert torch.equal(model(tokens).logits, before)


def test_embedded_inputs_count_as_records_too():
    model = prepare_model(hugging_face("BertForSequenceClassification"))
    with torch.no_grad():
        embedded = model.get_input_embeddings()(texts())
        assert torch.equal(model(inputs_embeds=embedded).logits, model(texts()).logits)


@pytest.mark.parametrize("wrapper", [GradSampleModule, GradSampleModuleExpandedWeights])
@pytest.mark.parametrize("records", [0, 1, RECORDS])
def test_a_small_model_of_ones_own_has_as_many_gradients_as_records(records, wrapper):
    if wrapper is GradSampleModuleExpandedWeights and not records:
        pytest.skip("expanded weights take no empty batch")
    model = prepare_model(Text())
    wrapper(model)(texts(records)).sum().backward()
    assert {p.grad_sample.shape[0] for p in model.parameters()} == {records}


def test_models_without_the_defect_are_left_alone():
    plain = prepare_model(nn.Sequential(nn.Linear(3, 2), nn.ReLU()))
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in plain.modules())
    model, tokens = hugging_face("RobertaForSequenceClassification"), texts()
    logits, asked = model(tokens).logits, lookups(model, tokens)
    assert not problem(model, tokens)
    prepare_model(model)
    assert torch.equal(model(tokens).logits, logits)
    assert lookups(model, tokens) == asked


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["copy", "pickle"],
)
def test_copies_work_on_their_own(duplicate):
    model = prepare_model(Text())
    other = duplicate(model)
    with torch.no_grad():
        other.embed.places.weight.zero_()
    assert lookups(other, texts(5))["embed.places"] == (5, LENGTH)
    assert torch.equal(other.embed(texts()), other.embed.words(texts()))
    assert lookups(model, texts(2))["embed.places"] == (2, LENGTH)


@pytest.mark.parametrize(
    "failure", [RuntimeError("error"), KeyboardInterrupt()], ids=["error", "interrupt"]
)
def test_a_call_that_failed_leaves_no_batch_size_behind(failure):
    model = prepare_model(Text())
    with pytest.raises(type(failure)):
        model(texts(7), fail=failure)
    if isinstance(failure, Exception):
        assert lookups(model.embed.places, torch.zeros(1, 3, dtype=torch.long))[""] == (1, 3)
    assert lookups(model, texts(2))["embed.places"] == (2, LENGTH)
    assert lookups(model, texts(1))["embed.places"] == (1, LENGTH)
    assert lookups(model.embed.places, torch.zeros(1, 3, dtype=torch.long))[""] == (1, 3)


def test_preparing_twice_is_preparing_once_for_wholes_and_parts():
    model = Text()
    for part in (model.embed, model, model.embed) * 2:
        prepare_model(part)
    assert [len(m._forward_pre_hooks) for m in model.modules()] == [1, 1, 1, 1, 0]
    assert lookups(model, texts())["embed.places"] == (RECORDS, LENGTH)
    assert lookups(model.embed, texts())["places"] == (RECORDS, LENGTH)


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "GPT2LMHeadModel"])
@pytest.mark.parametrize("length", [1, LENGTH])
def test_models_that_generate_do_so_as_before(name, length):
    model, tokens = hugging_face(name), texts()
    words = {"decoder_input_ids": texts(length=length)} if name[:2] == "T5" else {}
    before = model(input_ids=tokens, **words).logits
    written = model.eval().generate(tokens, max_new_tokens=4, do_sample=False)
    prepare_model(model.train())
    assert torch.equal(model(input_ids=tokens, **words).logits, before)
    assert torch.equal(model.eval().generate(tokens, max_new_tokens=4, do_sample=False), written)


def test_several_choices_per_record_are_not_taken_for_records():
    model = hugging_face("BertForMultipleChoice")
    tokens = texts(8).view(2, 4, LENGTH)
    before, asked = model(tokens).logits, lookups(model, tokens)
    prepare_model(model)
    prepare_model(model.bert)
    assert torch.equal(model(tokens).logits, before)
    assert lookups(model, tokens) == asked
    assert f"batch of one for every batch, {PLACES['Bert']}, so" in problem(model, tokens)


def test_images_with_learned_places_are_mended():
    class Patches(nn.Module):
        def __init__(self):
            super().__init__()
            self.cut, self.places = nn.Conv2d(1, 4, 4, 4), nn.Embedding(4, 4)

        def forward(self, x):
            return self.cut(x).flatten(2).transpose(1, 2) + self.places(torch.arange(4)[None])

    model, images = Patches(), torch.randn(3, 1, 8, 8)
    before = model(images)
    assert torch.equal(prepare_model(model)(images), before)
    assert lookups(model, images)["places"] == (3, 4)


def test_an_embedding_that_scales_by_frequency_is_left_alone():
    model = Text()
    model.embed.places.scale_grad_by_freq = True
    assert lookups(prepare_model(model), texts())["embed.places"] == (1, LENGTH)
