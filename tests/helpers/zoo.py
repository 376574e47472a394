"""All networks of the zoo with their permutations, and those that default tests use."""

import copy
import functools
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from helpers.attention_zoo import TRANSFORMERS
from helpers.convolution_zoo import CONVOLUTIONS
from helpers.hugging_face_zoo import HUGGING_FACE
from helpers.model_zoo import NETWORKS, build, run
from opacus_shuffle.permutation import PermutationPlan, PermutationSpec, find_permutations

ZOO = NETWORKS | CONVOLUTIONS | TRANSFORMERS | HUGGING_FACE
LEVELS = ("paper", "heads", "residual")

VARIED = [
    "mlp",
    "maxout",
    "mixture_of_experts",
    "conv_net",
    "grouped_conv",
    "timm_vit",
    "llama_by_hand",
    "einsum_attention",
]
"""One network for each form of nesting and packing."""

AT_EVERY_LEVEL = {"mlp", "conv_net", "timm_vit", "llama_by_hand"}
"""Default tests use these at all levels."""

SLOW = {
    "lstm",
    "torch_encoder_decoder",
}
AT_ONE_LEVEL = {*VARIED, *NETWORKS, *CONVOLUTIONS, *TRANSFORMERS} - SLOW
"""Default tests use these at level "residual". Hugging Face models are only in the zoo."""

# Roundings: sums of up to 400 terms, 20 one after the other, lose at most 8000 units of 1.1e-16 in
# double precision. In single precision, as roundings have either sign, expect sqrt(8000) units of
# 6e-8, and twice that between two evaluations.
DOUBLE, SINGLE = 1e-12, 1e-5
GRADIENT = 10 * DOUBLE  # backward is as long again, and derivatives of norms and softmax amplify

ROUNDS_TO_SINGLE = {
    *(
        "LlamaForCausalLM",
        "Qwen3ForCausalLM",
        "BloomForCausalLM",
    ),
}
"""Networks that convert to single precision inside."""


def marked(name: str, *values: object, level: str = "all") -> object:
    """Returns a test case for a network at a level, marked ``zoo`` unless it is a default one."""
    by_default = name in AT_EVERY_LEVEL or (level == "residual" and name in AT_ONE_LEVEL)
    marks = () if by_default else (pytest.mark.zoo,)
    return pytest.param(name, *values, id="-".join(map(str, (name, *values))), marks=marks)


def tiered(names: Iterable[str]) -> list[object]:
    """Returns test cases for networks, most of them marked ``zoo``."""
    return [marked(name) for name in names]


some_networks = pytest.mark.parametrize("name", tiered(ZOO))
every_network_and_level = pytest.mark.parametrize(
    ("name", "level"), [marked(name, level, level=level) for name in ZOO for level in LEVELS]
)


@functools.cache
def entry(name: str) -> tuple[nn.Module, object]:
    """Returns a network of the zoo in double precision and its input. Do not change them."""
    if name in HUGGING_FACE:
        pytest.importorskip("transformers")
    return build(ZOO[name])


@functools.cache
def spec_of(name: str, level: str = "residual") -> PermutationSpec:
    """Returns the permutations that are found in a network of the zoo."""
    module, sample = entry(name)
    return find_permutations(module, sample, groups=level)


def spec_if_any(module: nn.Module, sample: object) -> PermutationSpec | None:
    """Returns the permutations of a network, or None if no axis may be permuted."""
    try:
        return find_permutations(module, sample)
    except ValueError as error:
        if "no axis" not in str(error):
            raise
        return None


def outputs_stay(case: Callable[[], tuple[nn.Module, Any, list[Any]]]) -> bool:
    """Returns whether permutations found on a sample keep the outputs on it and on others."""
    others: list[Any] = []

    def builder() -> tuple[nn.Module, Any]:
        module, sample, others[:] = case()
        return module, sample

    def outputs(network: nn.Module, x: Any, seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        with torch.no_grad():
            return run(network, x)

    module, sample = build(builder)
    if (spec := spec_if_any(module, sample)) is None:
        return True
    for seed, x in enumerate([sample, *others]):
        for training in (False, True):
            shuffled = copy.deepcopy(module).train(training)
            spec.apply_(shuffled, draw(spec, seed))
            expected = outputs(copy.deepcopy(module).train(training), x, seed)
            if distance(expected, outputs(shuffled, x, seed)) > DOUBLE:
                return False
    return True


def draw(spec: PermutationSpec, seed: int) -> PermutationPlan:
    """Draws a permutation from a seed."""
    return spec.sample(torch.Generator().manual_seed(seed))


def same(one: nn.Module, other: nn.Module) -> bool:
    """Returns whether all parameters and buffers are equal, bit by bit."""
    return all(
        torch.equal(a, b)
        for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )


def distance(ones, others):
    """Returns the largest difference relative to the largest entry, over all tensors."""
    scale = max(float(one.detach().abs().max()) for one in ones)
    return (
        max(
            float((one - other).detach().abs().max())
            for one, other in zip(ones, others, strict=True)
        )
        / scale
    )
