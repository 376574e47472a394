"""Groups of packed projections, of real configurations and of classes are as worked out by hand."""

import math

import pytest
import torch
from helpers import hand_written_groups as by_hand
from helpers.changing_paths import inputs
from helpers.model_zoo import Wired, build, collect, entry_moves, run
from helpers.zoo import (
    DOUBLE,
    distance,
    entry,
    spec_of,
)
from torch import nn

from opacus_shuffle.permutation import find_permutations


@pytest.mark.parametrize(
    ("name", "bits"),
    {
        **{
            "mlp": 499,
            "conv_net": 225,
            "resnet": 266,
            "opacus_encoder": 964,
            "torch_encoder_pre_norm": 964,
        },
        **{
            "BertForSequenceClassification": 1081,
            "BertForMaskedLM": 964,
        },
        **{
            "ViTForImageClassification": 964,
            "GPT2LMHeadModel": 1804,
            "DistilBertForSequenceClassification": 1081,
        },
        **{"LlamaForCausalLM": 777, "GPTNeoXForCausalLM": 878},
    }.items(),
)
def test_formulas_give_the_numbers_of_the_table(name, bits):
    assert round(by_hand.SIZES[name].residual) == bits


@pytest.mark.parametrize(
    ("name", "parameter", "axis", "layout"),
    [
        ("torch_encoder_post_norm", "encoder.layers.0.self_attn.in_proj_weight", 0, "port head"),
        ("timm_vit", "blocks.0.attention.qkv.weight", 0, "port head"),
        ("nano_gpt", "blocks.1.attention.qkv.weight", 0, "port head"),
        pytest.param(
            *("GPT2LMHeadModel", "transformer.h.0.attn.c_attn.weight", 1, "port head"),
            marks=pytest.mark.zoo,
        ),
        pytest.param(
            *(
                "BloomForCausalLM",
                "transformer.h.0.self_attention.query_key_value.weight",
                0,
                "head port",
            ),
            marks=pytest.mark.zoo,
        ),
    ],
)
def test_packed_projections_move_queries_with_keys_and_values_apart(name, parameter, axis, layout):
    module, spec = entry(name)[0], spec_of(name, "heads")
    plan = spec.sample(torch.Generator().manual_seed(3))
    origins = entry_moves(spec, module, plan)[parameter].movedim(axis, 0)[:, 0]
    origins = origins // (dict(module.named_parameters())[parameter].shape[1] if axis == 0 else 1)
    shape = (3, 4, -1) if layout == "port head" else (4, 3, -1)
    old = origins.view(shape)
    port, head, inner = torch.unravel_index(old, old.shape)
    if layout == "head port":
        port, head, inner = (each.transpose(0, 1) for each in (head, port, inner))
    assert torch.equal(port, torch.arange(3).view(3, 1, 1).expand_as(port))
    assert torch.equal(head[0], head[1])
    assert torch.equal(head[0], head[2])
    assert torch.equal(inner[0], inner[1])
    assert not torch.equal(inner[0], inner[2])
    assert not torch.equal(inner[0, 0], inner[0, 1])


# Real configurations
# ------------------------------------------------------------------------------------------


def real(model, config, sample, **options):
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        module = getattr(transformers, model)(getattr(transformers, config)(**options))
        return module.eval(), {key: value.to("meta") for key, value in sample.items()}


# WS Table I, by WS Theorem 3 and WS Theorem 4 (``groups="paper"``).
@pytest.mark.zoo
@pytest.mark.parametrize(
    ("model", "config", "options", "sample", "size", "paper", "still"),
    [
        (
            "ViTForImageClassification",
            "ViTConfig",
            {"num_labels": 100},
            "images",
            by_hand.VIT_B,
            98.98,
            100,
        ),
        (
            "BertForSequenceClassification",
            "BertConfig",
            {"num_labels": 2},
            "tokens",
            by_hand.BERT_BASE,
            78.18,
            2,
        ),
        (
            "GPT2LMHeadModel",
            "GPT2Config",
            {"use_cache": False},
            "masked tokens",
            by_hand.GPT2_SMALL,
            68.31,
            0,
        ),
    ],
)
def test_real_configurations_move_what_the_table_says(
    model, config, options, sample, size, paper, still
):
    samples = {
        "images": {"pixel_values": torch.zeros(1, 3, 224, 224)},
        "tokens": {"input_ids": torch.zeros(1, 16).long()},
    }
    samples["masked tokens"] = samples["tokens"] | {"attention_mask": torch.zeros(1, 1, 16, 16)}
    module, sample = real(model, config, samples[sample], **options)
    total = sum(parameter.numel() for parameter in module.parameters())
    spec = find_permutations(module, sample, groups="paper")
    assert round(100 * spec.shuffle_ratio(module), 2) == paper
    assert spec.log2_size() == pytest.approx(size.paper, rel=1e-12)
    spec = find_permutations(module, sample)
    assert round((1 - spec.shuffle_ratio(module)) * total) == still
    assert spec.log2_size() == pytest.approx(size.residual, rel=1e-12)
    assert find_permutations(module, sample, groups="heads").log2_size() == pytest.approx(
        size.heads, rel=1e-12
    )


CASES = {}
case = collect(CASES)


def factorials(*sizes):
    return sum(math.lgamma(size + 1) for size in sizes) / math.log(2)


def by_class(activation):
    """Seven hidden units for each of three classes, and their sums by class."""

    def way(net, x):
        hidden = activation(torch.einsum("bi,jdi->bjd", x, net.enter))
        return torch.einsum("bjd,jd->bj", hidden, net.leave)

    return Wired(way, enter=torch.randn(3, 7, 4), leave=torch.randn(3, 7)), inputs((2, 4))[0]


@case
def units_of_classes():
    return *by_class(torch.relu), factorials(7, 7, 7)


@case
def units_of_classes_that_are_mixed():
    return *by_class(lambda h: torch.relu(h + h.flip(1))), factorials(7)


@case
def two_layers_of_units_of_classes():
    def way(net, x):
        h = torch.relu(torch.einsum("bi,jdi->bjd", x, net.enter) + net.shift)
        h = torch.einsum("bjd,jde->bje", h, net.between).tanh()
        return torch.einsum("bje,je->bj", h, net.leave).log_softmax(-1)

    shapes = {"enter": (3, 7, 4), "shift": (3, 7), "between": (3, 7, 5), "leave": (3, 5)}
    network = Wired(way, **{name: torch.randn(shape) for name, shape in shapes.items()})
    return network, inputs((2, 4))[0], factorials(7, 7, 7, 5, 5, 5)


@case
def groups_of_channels_that_are_outputs():
    layers = [nn.Conv1d(2, 18, 3), nn.GroupNorm(3, 18), nn.ReLU(), nn.Conv1d(18, 3, 3, groups=3)]
    return nn.Sequential(*layers), inputs((2, 2, 9))[0], factorials(6, 6, 6)


@case
def depthwise_convolutions_of_inputs():
    layers = [nn.Conv1d(3, 15, 3, groups=3), nn.Tanh(), nn.Conv1d(15, 12, 1, groups=3)]
    layers += [nn.ReLU(), nn.Conv1d(12, 6, 1, groups=3)]
    return nn.Sequential(*layers), inputs((2, 3, 9))[0], factorials(5, 5, 5, 4, 4, 4)


@pytest.mark.parametrize("name", CASES)
def test_each_class_has_a_permutation_of_its_own_and_outputs_stay(name):
    module, sample = build(lambda: CASES[name]()[:2])
    spec, before = find_permutations(module, sample), run(module, 2 * sample)
    assert spec.log2_size() == pytest.approx(CASES[name]()[2], rel=1e-12)
    spec.apply_(module, spec.sample(torch.Generator().manual_seed(1)))
    assert distance(before, run(module, 2 * sample)) <= DOUBLE
