"""What find_permutations finds keeps the function, and nothing is left behind."""

import copy
import math
import random

import numpy as np
import pytest
import torch
from helpers import hand_written_groups as by_hand
from helpers.model_zoo import another, build, cast, gradients, run
from helpers.random_zoo import random_network
from helpers.zoo import (
    DOUBLE,
    GRADIENT,
    HUGGING_FACE,
    LEVELS,
    NETWORKS,
    ROUNDS_TO_SINGLE,
    SINGLE,
    ZOO,
    distance,
    entry,
    every_network_and_level,
    marked,
    some_networks,
    spec_if_any,
    spec_of,
    tiered,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus import GradSampleModule
from torch import nn

from opacus_shuffle.permutation import find_permutations

# Functions stay as they are
# ------------------------------------------------------------------------------------------


# WS Definition 5.
@every_network_and_level
def test_shuffling_again_and_again_changes_no_output(name, level):
    module, sample = entry(name)
    shuffled, spec = copy.deepcopy(module), spec_of(name, level)
    tolerance = SINGLE if name in ROUNDS_TO_SINGLE else DOUBLE
    moved = False
    for seed in range(2):
        spec.apply_(shuffled, spec.sample(torch.Generator().manual_seed(seed)))
        moved |= any(
            not torch.equal(old, new)
            for old, new in zip(module.parameters(), shuffled.parameters(), strict=True)
        )
        with torch.no_grad():
            for x in (sample, another(sample)):
                assert distance(run(module, x), run(shuffled, x)) <= tolerance
    assert moved


@pytest.mark.parametrize("name", tiered(ZOO))
def test_gradients_of_the_shuffled_network_are_the_shuffled_gradients(name):
    module, sample = entry(name)
    shuffled, spec = copy.deepcopy(module), spec_of(name)
    gradients(shuffled, sample)
    spec.apply_(shuffled, spec.sample(torch.Generator().manual_seed(7)))
    moved = {
        key: parameter.grad.clone()
        for key, parameter in shuffled.named_parameters()
        if parameter.grad is not None
    }
    fresh = gradients(shuffled, sample)
    assert moved.keys() == fresh.keys()
    tolerance = 10 * SINGLE if name in ROUNDS_TO_SINGLE else GRADIENT
    assert distance(list(moved.values()), [fresh[key] for key in moved]) <= tolerance


@pytest.mark.parametrize(
    "name",
    [
        *("batch_norm", "opacus_encoder", "resnet", "timm_vit", "gru", "mixture_of_experts"),
        pytest.param("lstm", marks=pytest.mark.zoo),
    ],
)
def test_in_training_mode_outputs_stay_too(name):
    module, sample = entry(name)
    module, spec = copy.deepcopy(module).train(), spec_of(name)
    shuffled = copy.deepcopy(module)
    spec.apply_(shuffled, spec.sample(torch.Generator().manual_seed(2)))
    assert distance(run(module, sample), run(shuffled, sample)) <= DOUBLE


@pytest.mark.parametrize(
    "examples",
    [10, pytest.param(500, marks=pytest.mark.slow)],
)
def test_random_networks_keep_their_outputs(examples):
    @settings(max_examples=examples)
    @given(seed=st.integers(0, 2**32))
    def keep_their_outputs(seed):
        module, sample = build(lambda: random_network(seed), seed=seed)
        if (spec := spec_if_any(module, sample)) is None:
            return
        with torch.no_grad():
            expected = run(module, sample)
            for number in range(4):
                shuffled = copy.deepcopy(module)
                spec.apply_(shuffled, spec.sample(torch.Generator().manual_seed(number)))
                assert distance(expected, run(shuffled, sample)) <= DOUBLE, module.names

    keep_their_outputs()


# How large the group is
# ------------------------------------------------------------------------------------------


# WS Definition 3, WS Definition 4: perceptrons and encoder blocks are among the networks.
@pytest.mark.parametrize(
    ("name", "level", "bits"),
    [
        marked(name, level, bits, level=level)
        for name, size in by_hand.SIZES.items()
        for level, bits in size._asdict().items()
        if not math.isnan(bits)
    ],
)
def test_the_group_is_the_one_worked_out_by_hand(name, level, bits):
    assert spec_of(name, level).log2_size() == pytest.approx(bits, rel=1e-12)


@some_networks
def test_each_level_contains_the_one_before(name):
    paper, heads, residual = (spec_of(name, level) for level in LEVELS)
    assert 0 < paper.log2_size() <= heads.log2_size() <= residual.log2_size()
    assert set(paper.blocks) <= set(heads.blocks) <= set(residual.blocks)


# What it depends on, and what is left behind
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiered(name for name in ZOO if name not in HUGGING_FACE))
def test_only_shapes_of_the_input_matter(name):
    module, sample = entry(name)
    assert find_permutations(module, another(sample, seed=4)) == spec_of(name)


@pytest.mark.parametrize("size", [1, pytest.param(5, marks=pytest.mark.zoo)])
@pytest.mark.parametrize(
    "name",
    ["conv_net", "timm_vit", "ensemble", "llama_by_hand", "einsum_attention", "gated_linear_units"],
)
def test_the_size_of_the_batch_does_not_matter(name, size):
    module, sample = entry(name)
    batch = torch.cat([sample, sample])[:size]
    assert find_permutations(module, batch) == spec_of(name)


def test_inputs_may_be_a_tensor_a_tuple_or_keywords():
    module, x = build(NETWORKS["mlp"])
    assert (
        find_permutations(module, x)
        == find_permutations(module, (x,))
        == find_permutations(module, {"input": x})
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_type_of_numbers_does_not_matter(dtype):
    module, sample = entry("timm_vit")
    assert find_permutations(copy.deepcopy(module).to(dtype), cast(sample, dtype)) == spec_of(
        "timm_vit"
    )


def test_a_wrapped_network_has_the_same_permutations():
    module, sample = entry("timm_vit")
    wrapped = GradSampleModule(copy.deepcopy(module), strict=False)
    spec = find_permutations(wrapped, sample)
    assert spec == spec_of("timm_vit")
    spec.apply_(wrapped, spec.sample())
    with torch.no_grad():
        assert distance(run(module, sample), run(wrapped, sample)) <= DOUBLE


@pytest.mark.parametrize(
    "name",
    [
        *("batch_norm", "resnet", "opacus_encoder", "gru"),
        *(
            pytest.param(name, marks=pytest.mark.zoo)
            for name in ("lstm", "BertForSequenceClassification")
        ),
    ],
)
def test_the_network_and_all_random_states_are_left_as_they_were(name):
    module, sample = copy.deepcopy(entry(name)[0]), entry(name)[1]
    gradients(module, sample)
    module.train()
    next(module.children()).eval()
    next(module.parameters()).requires_grad_(False)

    def state():
        grads = {key: parameter.grad for key, parameter in module.named_parameters()}
        hooks = [
            [len(getattr(part, kind)) for kind in vars(part) if kind.endswith("_hooks")]
            for part in module.modules()
        ]
        return {
            "values": {
                key: (id(value), value.data_ptr(), value.clone())
                for key, value in module.state_dict(keep_vars=True).items()
            },
            "grads": {
                key: grad if grad is None else (id(grad), grad.clone())
                for key, grad in grads.items()
            },
            "flags": [(part.training, list(vars(part))) for part in module.modules()],
            "needs": [parameter.requires_grad for parameter in module.parameters()],
            "hooks": hooks,
            "random": (torch.get_rng_state(), repr(np.random.get_state()), random.getstate()),  # noqa: NPY002
            "modes": (
                torch.is_grad_enabled(),
                torch.backends.mha.get_fastpath_enabled(),
                torch.get_default_dtype(),
            ),
        }

    before, kept = state(), copy.deepcopy(sample)
    find_permutations(module, sample)
    after = state()
    assert repr(before) == repr(after)
    leaves = map(torch.utils._pytree.tree_leaves, ((before, kept), (after, sample)))
    for one, other in zip(*leaves, strict=True):
        assert torch.equal(one, other) if torch.is_tensor(one) else one == other


# Refusals
# ------------------------------------------------------------------------------------------


def test_a_network_without_hidden_axes_is_refused_with_what_was_looked_at():
    with pytest.raises(ValueError, match=r"weight \(3, 5\), bias \(3,\)"):
        find_permutations(nn.Linear(5, 3), torch.randn(2, 5))


@pytest.mark.parametrize("groups", ["all", "", None, 3])
def test_other_levels_are_refused(groups):
    with pytest.raises(ValueError, match="residual"):
        find_permutations(*build(NETWORKS["mlp"]), groups=groups)


@pytest.mark.parametrize(
    "sample",
    [
        torch.randn(2, 11),
        (),
        "text",
        (torch.randn(2, 12), torch.randn(2)),
        {"wrong": torch.randn(2, 12)},
        3.0,
    ],
)
def test_inputs_that_do_not_fit_are_refused(sample):
    with pytest.raises(ValueError, match="sample_input"):
        find_permutations(build(NETWORKS["mlp"])[0].float(), sample)


@pytest.mark.zoo
def test_the_original_of_a_module_moves_as_the_copy_that_peft_trains():
    """It is in use while adapters are disabled; unreached, it fixed all axes of its sizes."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    config = peft.LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"])
    model, x = peft.get_peft_model(network, config).eval(), torch.randn(5, 4)
    spec = find_permutations(model, x)
    answers = [model(x)]
    with model.disable_adapter():
        answers.append(model(x))
    spec.apply_(model, spec.sample())
    torch.testing.assert_close(model(x), answers[0])
    with model.disable_adapter():
        torch.testing.assert_close(model(x), answers[1])
    assert (spec.unreached, "base_model.model.0.base_layer.weight" in spec.blocks) == ((), True)
