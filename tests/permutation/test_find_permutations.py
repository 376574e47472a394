"""What find_permutations finds in a zoo of networks: functions stay as they are, groups are as large as worked out by hand."""

from __future__ import annotations

import copy
import functools
import math
import random

import numpy as np
import pytest
import torch
from helpers import hand_written_groups as by_hand
from helpers.attention_zoo import TRANSFORMERS
from helpers.convolution_zoo import CONVOLUTIONS
from helpers.hugging_face_zoo import HUGGING_FACE
from helpers.model_zoo import NETWORKS, Apply, another, build, cast, entry_moves, gradients, run
from helpers.random_zoo import random_network
from hypothesis import example, given, settings
from hypothesis import strategies as st
from opacus import GradSampleModule
from torch import nn

from opacus_shuffle.permutation import ModuleAxes, PermutationSpec, find_permutations, register_permutation

ZOO = NETWORKS | CONVOLUTIONS | TRANSFORMERS | HUGGING_FACE
LEVELS = ("paper", "heads", "residual")

# Roundings: sums of up to 400 terms, 20 one after the other, lose at most 8000 units of 1.1e-16 in double precision. In single
# precision, as roundings have either sign, expect sqrt(8000) units of 6e-8, and twice that between two evaluations.
DOUBLE, SINGLE = 1e-12, 1e-5
GRADIENT = 10 * DOUBLE  # backward is as long again, and derivatives of norms and softmax amplify

ROUNDS_TO_SINGLE = {
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "GemmaForCausalLM", "BloomForCausalLM"),
}
"""Networks that convert to single precision inside, whatever their parameters are."""

every_network = pytest.mark.parametrize("name", ZOO)
every_level = pytest.mark.parametrize("level", LEVELS)


@functools.cache
def entry(name: str) -> tuple[nn.Module, object]:
    """A network of the zoo in double precision and its input; shared, so not to be changed."""
    if name in HUGGING_FACE:
        pytest.importorskip("transformers")
    return build(ZOO[name])


@functools.cache
def found(name: str, level: str) -> PermutationSpec:
    """What is found in it."""
    module, sample = entry(name)
    return find_permutations(module, sample, groups=level)


def distance(ones, others):
    """Largest difference relative to the largest entry, over all tensors."""
    scale = max(float(one.abs().max()) for one in ones)
    return max(float((one - other).abs().max()) for one, other in zip(ones, others, strict=True)) / scale


# Functions stay as they are ---------------------------------------------------------------------------------------------------


@every_level
@every_network
def test_shuffling_again_and_again_changes_no_output(name, level):
    module, sample = entry(name)
    shuffled, spec = copy.deepcopy(module), found(name, level)
    tolerance = SINGLE if name in ROUNDS_TO_SINGLE else DOUBLE
    moved = False
    for seed in range(3):
        spec.apply_(shuffled, spec.sample(torch.Generator().manual_seed(seed)))
        moved |= any(not torch.equal(old, new) for old, new in zip(module.parameters(), shuffled.parameters(), strict=True))
        with torch.no_grad():
            for x in (sample, another(sample)):
                assert distance(run(module, x), run(shuffled, x)) <= tolerance
    assert moved


@every_network
def test_in_single_precision_outputs_stay_within_its_rounding(name):
    module, sample = entry(name)
    spec = found(name, "residual")
    plain, shuffled, sample = copy.deepcopy(module).float(), copy.deepcopy(module).float(), cast(sample, torch.float32)
    spec.apply_(shuffled, spec.sample(torch.Generator().manual_seed(5)))
    with torch.no_grad():
        assert distance(run(plain, sample), run(shuffled, sample)) <= SINGLE


@every_level
@every_network
def test_gradients_of_the_shuffled_network_are_the_shuffled_gradients(name, level):
    module, sample = entry(name)
    shuffled, spec = copy.deepcopy(module), found(name, level)
    gradients(shuffled, sample)
    spec.apply_(shuffled, spec.sample(torch.Generator().manual_seed(7)))
    moved = {key: parameter.grad.clone() for key, parameter in shuffled.named_parameters() if parameter.grad is not None}
    fresh = gradients(shuffled, sample)
    assert moved.keys() == fresh.keys()
    tolerance = 10 * SINGLE if name in ROUNDS_TO_SINGLE else GRADIENT
    assert distance(list(moved.values()), [fresh[key] for key in moved]) <= tolerance


@pytest.mark.parametrize("name", ["batch_norm", "opacus_encoder", "resnet", "timm_vit", "lstm", "mixture_of_experts"])
def test_in_training_mode_outputs_stay_too(name):
    module, sample = entry(name)
    module, spec = copy.deepcopy(module).train(), found(name, "residual")
    shuffled = copy.deepcopy(module)
    spec.apply_(shuffled, spec.sample(torch.Generator().manual_seed(2)))
    assert distance(run(module, sample), run(shuffled, sample)) <= DOUBLE


@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 2**32))
@example(seed=414).via("entries chosen by position, added back")
@example(seed=1026).via("units of two groups, each paired with each")
@example(seed=1107).via("pooling, subtracted")
@example(seed=1458).via("products of pieces, seen otherwise")
def test_random_networks_keep_their_outputs(seed):
    module, sample = build(lambda: random_network(seed), seed=seed)
    try:
        spec = find_permutations(module, sample)
    except ValueError as error:
        if "no axis" not in str(error):
            raise
        return
    with torch.no_grad():
        expected = run(module, sample)
        for number in range(4):
            shuffled = copy.deepcopy(module)
            spec.apply_(shuffled, spec.sample(torch.Generator().manual_seed(number)))
            assert distance(expected, run(shuffled, sample)) <= DOUBLE, module.names


# Groups are as large as they should be ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "level", "bits"),
    [
        pytest.param(name, level, bits, id=f"{name}-{level}")
        for name, size in by_hand.SIZES.items()
        for level, bits in size._asdict().items()
        if not math.isnan(bits)
    ],
)
def test_the_group_is_the_one_worked_out_by_hand(name, level, bits):
    assert found(name, level).log2_size() == pytest.approx(bits, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "bits"),
    {
        **{"mlp": 499, "conv_net": 225, "resnet": 266, "opacus_encoder": 964, "torch_encoder_pre_norm": 964},
        **{"BertForSequenceClassification": 1081, "BertForMaskedLM": 964, "RobertaForSequenceClassification": 1081},
        **{"ViTForImageClassification": 964, "GPT2LMHeadModel": 1804, "DistilBertForSequenceClassification": 1081},
        **{"LlamaForCausalLM": 777, "GPTNeoXForCausalLM": 878},
    }.items(),
)
def test_formulas_give_the_numbers_of_the_table(name, bits):
    assert round(by_hand.SIZES[name].residual) == bits


@every_network
def test_each_level_contains_the_one_before(name):
    paper, heads, residual = (found(name, level) for level in LEVELS)
    assert 0 < paper.log2_size() <= heads.log2_size() <= residual.log2_size()
    assert set(paper.blocks) <= set(heads.blocks) <= set(residual.blocks)


@every_network
def test_what_counts_as_movable_moves_and_nothing_else(name):
    module, spec = entry(name)[0], found(name, "residual")
    ever = {key: torch.zeros(parameter.shape, dtype=torch.bool) for key, parameter in module.named_parameters()}
    for seed in range(30):  # an entry that one swap moves stays put in all 30 draws with chance 1e-9
        moves = entry_moves(spec, module, spec.sample(torch.Generator().manual_seed(seed)))
        for key, origin in moves.items():
            ever[key] |= origin != torch.arange(origin.numel()).view(origin.shape)
    assert all(torch.equal(origin.flatten().sort().values, torch.arange(origin.numel())) for origin in moves.values())
    for key, moved in ever.items():
        assert spec.moved_fraction(key) == pytest.approx(float(moved.double().mean()), abs=1e-12), key
    total = sum(moved.numel() for moved in ever.values())
    assert spec.shuffle_ratio(module) == pytest.approx(sum(int(moved.sum()) for moved in ever.values()) / total, abs=1e-12)


@pytest.mark.parametrize("name", by_hand.ELEMENTS)
def test_elements_made_by_hand_change_no_output_and_move_what_is_found(name):
    module, sample = entry(name)
    spec, tied = found(name, "residual"), copy.deepcopy(module)
    ever = {key: torch.zeros(parameter.shape, dtype=torch.bool) for key, parameter in module.named_parameters()}
    for seed in range(12):
        by_hand.apply(by_hand.random_element(name, module, seed), tied)
        numbered = copy.deepcopy(module)
        with torch.no_grad():
            for parameter in numbered.parameters():
                parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape))
        by_hand.apply(by_hand.random_element(name, module, seed), numbered)
        for key, parameter in numbered.named_parameters():
            ever[key] |= parameter != torch.arange(parameter.numel()).view(parameter.shape)
    with torch.no_grad():
        assert distance(run(module, sample), run(tied, sample)) <= DOUBLE
    for key, moved in ever.items():
        assert spec.moved_fraction(key) == pytest.approx(float(moved.double().mean()), abs=1e-12), key


@pytest.mark.parametrize(
    ("name", "parameter", "axis", "layout"),
    [
        ("torch_encoder_post_norm", "encoder.layers.0.self_attn.in_proj_weight", 0, "port head"),
        ("timm_vit", "blocks.0.attention.qkv.weight", 0, "port head"),
        ("nano_gpt", "blocks.1.attention.qkv.weight", 0, "port head"),
        ("interleaved", "blocks.0.attention.qkv.weight", 0, "head port"),
        ("GPT2LMHeadModel", "transformer.h.0.attn.c_attn.weight", 1, "port head"),
        ("BloomForCausalLM", "transformer.h.0.self_attention.query_key_value.weight", 0, "head port"),
    ],
)
def test_packed_projections_move_queries_with_keys_and_values_apart(name, parameter, axis, layout):
    module, spec = entry(name)[0], found(name, "heads")
    plan = spec.sample(torch.Generator().manual_seed(3))
    origins = entry_moves(spec, module, plan)[parameter].movedim(axis, 0)[:, 0]
    origins = origins // (dict(module.named_parameters())[parameter].shape[1] if axis == 0 else 1)
    size = len(origins) // 12
    shape = (3, 4, size) if layout == "port head" else (4, 3, size)
    index = torch.arange(len(origins)).view(shape)
    old = origins.view(shape)
    if layout == "head port":
        index, old = index.transpose(0, 1), old.transpose(0, 1)
    port, head, inner = (torch.empty_like(old) for _ in range(3))
    for p in range(3):
        for h in range(4):
            for i in range(size):
                hit = old == index[p, h, i]
                port[hit], head[hit], inner[hit] = p, h, i
    assert torch.equal(port, torch.arange(3).view(3, 1, 1).expand_as(port))
    assert torch.equal(head[0], head[1])
    assert torch.equal(head[0], head[2])
    assert torch.equal(inner[0], inner[1])
    assert not torch.equal(inner[0], inner[2])
    assert not torch.equal(inner[0, 0], inner[0, 1])


# Real configurations ----------------------------------------------------------------------------------------------------------


def real(model, config, sample, **options):
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        module = getattr(transformers, model)(getattr(transformers, config)(**options))
        return module.eval(), {key: value.to("meta") for key, value in sample.items()}


@pytest.mark.parametrize(
    ("model", "config", "options", "sample", "size", "paper", "still"),
    [
        ("ViTForImageClassification", "ViTConfig", {"num_labels": 100}, "images", by_hand.VIT_B, 98.98, 100),
        ("BertForSequenceClassification", "BertConfig", {"num_labels": 2}, "tokens", by_hand.BERT_BASE, 78.18, 2),
        ("GPT2LMHeadModel", "GPT2Config", {"use_cache": False}, "masked tokens", by_hand.GPT2_SMALL, 68.31, 0),
    ],
)
def test_real_configurations_move_what_the_table_says(model, config, options, sample, size, paper, still):
    samples = {"images": {"pixel_values": torch.zeros(1, 3, 224, 224)}, "tokens": {"input_ids": torch.zeros(1, 16).long()}}
    samples["masked tokens"] = samples["tokens"] | {"attention_mask": torch.zeros(1, 1, 16, 16)}
    module, sample = real(model, config, samples[sample], **options)
    total = sum(parameter.numel() for parameter in module.parameters())
    spec = find_permutations(module, sample, groups="paper")
    assert round(100 * spec.shuffle_ratio(module), 2) == paper
    assert spec.log2_size() == pytest.approx(size.paper, rel=1e-12)
    spec = find_permutations(module, sample)
    assert round((1 - spec.shuffle_ratio(module)) * total) == still
    assert spec.log2_size() == pytest.approx(size.residual, rel=1e-12)
    assert find_permutations(module, sample, groups="heads").log2_size() == pytest.approx(size.heads, rel=1e-12)


# Nothing on a guess -----------------------------------------------------------------------------------------------------------


@torch.library.custom_op("opacus_shuffle_tests::leaky_cumsum", mutates_args=())
def leaky_cumsum(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(-1)


OPAQUE = {
    "custom operator": leaky_cumsum,
    "sort": lambda x: x.sort(-1).values,
    "fourier transform": lambda x: torch.fft.rfft(x).real,
    "cumulative sum": lambda x: x.cumsum(-1),
    "matrix exponential": lambda x: torch.linalg.matrix_exp(torch.diag_embed(x) / 9).flatten(1),
    "flip": lambda x: x + x.flip(-1),
    "every second": lambda x: x[:, ::2],
    "gather": lambda x: x.gather(1, torch.tensor([[0, 3, 2]]).expand(len(x), -1)),
    "constant factors": lambda x: x * torch.arange(8, dtype=x.dtype),
    "own order": lambda x: x.take_along_dim(x.argsort(1), 1),
    "unfold": lambda x: x.unfold(1, 3, 1).flatten(1),
    "convolution over units": lambda x: torch.conv1d(x.unsqueeze(1), torch.ones(1, 1, 3).to(x)).flatten(1),
    "written through a view": lambda x: x.clone().index_fill_(1, torch.tensor([0]), 0.0),
    "memory seen otherwise": lambda x: torch.as_strided(x.contiguous(), (len(x), 4), (8, 2)),
}


@pytest.mark.parametrize("operation", OPAQUE)
def test_operations_that_tell_units_apart_keep_them_in_place(operation):
    function = OPAQUE[operation]
    with torch.random.fork_rng(devices=[]):
        width = function(torch.randn(2, 8)).shape[1]
        front = [nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 8), nn.Tanh(), Apply(function)]
        module = nn.Sequential(*front, nn.Linear(width, 7), nn.GELU(), nn.Linear(7, 3))
    spec = find_permutations(module, torch.randn(4, 5))
    assert spec.log2_size() == pytest.approx(by_hand.symmetric(6) + by_hand.symmetric(7))
    assert spec.moved_fraction("2.bias") == 0
    assert set(spec.axes_to_perm) == {"0.weight", "0.bias", "2.weight", "5.weight", "5.bias", "7.weight"}


def test_a_network_without_hidden_axes_is_refused_with_what_was_looked_at():
    with pytest.raises(ValueError, match=r"weight \(3, 5\), bias \(3,\)"):
        find_permutations(nn.Linear(5, 3), torch.randn(2, 5))


def test_operations_without_a_rule_are_named_when_nothing_is_found():
    with pytest.raises(ValueError, match="leaky_cumsum"):
        find_permutations(nn.Sequential(nn.Linear(5, 8), Apply(leaky_cumsum), nn.Linear(8, 3)), torch.randn(2, 5))


@pytest.mark.parametrize("groups", ["all", "", None, 3])
def test_other_levels_are_refused(groups):
    with pytest.raises(ValueError, match="residual"):
        find_permutations(*build(NETWORKS["mlp"]), groups=groups)


@pytest.mark.parametrize(
    "sample", [torch.randn(2, 11), (), "text", (torch.randn(2, 12), torch.randn(2)), {"wrong": torch.randn(2, 12)}, 3.0]
)
def test_inputs_that_do_not_fit_are_refused(sample):
    with pytest.raises(ValueError, match="sample_input"):
        find_permutations(build(NETWORKS["mlp"])[0].float(), sample)


@torch.library.custom_op("opacus_shuffle_tests::opaque_perceptron", mutates_args=())
def opaque_perceptron(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ up.T) @ down.T


class Opaque(nn.Module):
    """A perceptron that tracing cannot see into."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(7, 6)), nn.Parameter(torch.randn(5, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return opaque_perceptron(x, self.up, self.down)


@pytest.mark.parametrize(
    ("down", "found"), [("out unit", by_hand.symmetric(6) + by_hand.symmetric(7) + by_hand.symmetric(5)), ("out _", None)]
)
def test_axes_declared_by_hand_are_used_and_checked(down, found):
    class Declared(Opaque):
        pass

    @register_permutation(Declared)
    def axes(module: Declared) -> ModuleAxes:
        return ModuleAxes(parameters={"up": "unit in", "down": down}, inputs="... in", outputs="... out")

    sample = torch.randn(4, 4)
    undeclared = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 6), Opaque(), nn.Linear(5, 2))
    assert find_permutations(undeclared, sample).log2_size() == pytest.approx(by_hand.symmetric(3))
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), Declared(), nn.Linear(5, 2))
    if found is None:
        with pytest.raises(ValueError, match=r"2\.up"):
            find_permutations(module, sample)
    else:
        assert find_permutations(module, sample).log2_size() == pytest.approx(found)


# What the result depends on, and what is left behind --------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in ZOO if name not in HUGGING_FACE])
def test_only_shapes_of_the_input_matter(name):
    module, sample = entry(name)
    assert find_permutations(module, another(sample, seed=4)) == found(name, "residual")


@pytest.mark.parametrize("size", [1, 2, 4, 5])
@pytest.mark.parametrize(
    "name", ["conv_net", "timm_vit", "ensemble", "llama_by_hand", "einsum_attention", "gated_linear_units"]
)
def test_the_size_of_the_batch_does_not_matter(name, size):
    module, sample = entry(name)
    batch = torch.cat([sample, sample])[:size]
    assert find_permutations(module, batch) == found(name, "residual")


def test_inputs_may_be_a_tensor_a_tuple_or_keywords():
    module, x = build(NETWORKS["mlp"])
    assert find_permutations(module, x) == find_permutations(module, (x,)) == find_permutations(module, {"input": x})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_type_of_numbers_does_not_matter(dtype):
    module, sample = entry("timm_vit")
    assert find_permutations(copy.deepcopy(module).to(dtype), cast(sample, dtype)) == found("timm_vit", "residual")


def test_a_wrapped_network_has_the_same_permutations():
    module, sample = entry("timm_vit")
    wrapped = GradSampleModule(copy.deepcopy(module), strict=False)
    spec = find_permutations(wrapped, sample)
    assert spec == found("timm_vit", "residual")
    spec.apply_(wrapped, spec.sample())
    with torch.no_grad():
        assert distance(run(module, sample), run(wrapped, sample)) <= DOUBLE


@pytest.mark.parametrize("name", ["batch_norm", "resnet", "opacus_encoder", "lstm", "BertForSequenceClassification"])
def test_the_network_and_all_random_states_are_left_as_they_were(name):
    module, sample = copy.deepcopy(entry(name)[0]), entry(name)[1]
    gradients(module, sample)
    module.train()
    next(module.children()).eval()
    next(module.parameters()).requires_grad_(False)

    def state():
        grads = {key: parameter.grad for key, parameter in module.named_parameters()}
        hooks = [[len(getattr(each, kind)) for kind in vars(each) if kind.endswith("_hooks")] for each in module.modules()]
        return {
            "values": {
                key: (id(value), value.data_ptr(), value.clone()) for key, value in module.state_dict(keep_vars=True).items()
            },
            "grads": {key: grad if grad is None else (id(grad), grad.clone()) for key, grad in grads.items()},
            "flags": [(each.training, list(vars(each))) for each in module.modules()],
            "needs": [parameter.requires_grad for parameter in module.parameters()],
            "hooks": hooks,
            "random": (torch.get_rng_state(), repr(np.random.get_state()), random.getstate()),  # noqa: NPY002
            "modes": (torch.is_grad_enabled(), torch.backends.mha.get_fastpath_enabled(), torch.get_default_dtype()),
        }

    before, kept = state(), copy.deepcopy(sample)
    find_permutations(module, sample)
    after = state()
    assert repr(before) == repr(after)
    for one, other in zip(torch.utils._pytree.tree_leaves(before), torch.utils._pytree.tree_leaves(after), strict=True):
        assert torch.equal(one, other) if torch.is_tensor(one) else one == other
    for one, other in zip(torch.utils._pytree.tree_leaves(kept), torch.utils._pytree.tree_leaves(sample), strict=True):
        assert torch.equal(one, other) if torch.is_tensor(one) else one == other
