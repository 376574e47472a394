"""Networks and runs that once were permuted wrongly, crashed or were refused for no reason; each found by an attack."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional

from opacus_shuffle.engine.weights.shuffler import WeightShuffler
from opacus_shuffle.permutation import PermutationSpec, find_permutations
from opacus_shuffle.permutation.moving.gather import gather_
from opacus_shuffle.permutation.moving.moves import Move

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def mlp(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), *(middle or (nn.Tanh(),)), nn.Linear(6, 2))


def moving(spec: PermutationSpec) -> set[str]:
    return set(spec.blocks)


class Heads(nn.Module):
    """Two results; ``give`` says how they are returned."""

    def __init__(self, give):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.one, self.two, self.give = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(6, 2), give

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.give(self.one(h), self.two(h))


class Result:
    def __init__(self, logits, value):
        self.logits, self.value = logits, value


@pytest.mark.parametrize(
    "give",
    [
        lambda one, two: (torch.distributions.Categorical(logits=one), two),
        lambda one, two: (torch.distributions.Normal(one, 1.0, validate_args=False), two),
        Result,
        lambda one, two: {"out": Result(one, None), "more": [two]},
        lambda one, two: {"y": two, "cached_features": one},
    ],
    ids=["categorical", "normal", "object", "nested", "cached features"],
)
def test_whatever_a_network_returns_stays_in_place(give):
    spec = find_permutations(Heads(give), X)
    assert moving(spec) == {"body.weight", "body.bias", "one.weight", "two.weight"}
    assert not any(name == "one.weight" and axis == 0 for axes in spec.perm_to_axes.values() for name, axis in axes)


def test_what_a_module_keeps_for_the_loss_stays_in_place():
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x):
            self.hidden = self.inner(x)
            return self.outer(self.hidden.relu())

    with pytest.raises(ValueError, match="no axis that may be permuted"):
        find_permutations(Keeping(), X)


@pytest.mark.parametrize("huge", [torch.finfo(torch.float32).min, -1e9, 1e12])
def test_huge_outputs_do_not_hide_a_wrong_permutation(huge):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            y = self.net(x)
            return y.masked_fill(torch.eye(3, 2, dtype=torch.bool), huge), y.new_full((2,), huge)

    data = find_permutations(Masked(), X).to_dict()
    del data["blocks"]["net.2.weight"], data["shapes"]["net.2.weight"]
    with pytest.raises(ValueError, match="changes what Masked computes"):
        PermutationSpec.from_dict(data).check(Masked(), X)


@pytest.mark.parametrize("buffer", ["running_mean", "running_var"])
def test_a_forgotten_running_statistic_shows_at_initialisation(buffer):
    network = mlp(nn.BatchNorm1d(6), nn.Tanh())
    data = find_permutations(network, X).to_dict()
    del data["blocks"][f"1.{buffer}"], data["shapes"][f"1.{buffer}"]
    data["buffers"].remove(f"1.{buffer}")
    with pytest.raises(ValueError, match="changes what Sequential computes"):
        PermutationSpec.from_dict(data).check(network, X)


@pytest.mark.parametrize("noise", [lambda h: functional.dropout(h, 0.3, True), lambda h: h + torch.randn_like(h)])
def test_noise_in_evaluation_mode_is_no_reason_to_refuse(noise):
    class Noisy(nn.Module):
        def forward(self, x):
            return noise(x)

    assert round(2 ** find_permutations(mlp(Noisy(), nn.ReLU()), X).log2_size()) == 720


def test_dropout_does_not_hide_a_mistake_of_the_training_path():
    class Trained(nn.Module):
        def forward(self, x):
            return torch.from_numpy(x.detach().numpy() * range(6)).to(x.dtype) if self.training else x

    with pytest.raises(ValueError, match=r"Tensor\.numpy"):
        find_permutations(mlp(Trained(), nn.Dropout(0.1)), X)


def test_values_that_leave_pytorch_keep_their_axes_in_place_and_the_others_move():
    class Leaving(nn.Module):
        def forward(self, x):
            return torch.tensor(x.tolist(), dtype=x.dtype)

    spec = find_permutations(nn.Sequential(*mlp(Leaving(), nn.ReLU())[:-1], nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)), X)
    assert round(2 ** spec.log2_size()) == 120
    assert "Tensor.tolist" in spec.describe()


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 2)
        self.register_buffer("scale", scale)

    def forward(self, x):
        return self.down(self.up(x).relu() * self.scale)


def test_memory_shared_by_tensors_that_move_is_refused_by_name():
    one, two, three = mlp(), mlp(), Scaled(torch.ones(1).expand(6))
    one.register_buffer("part", one[0].weight.data[2:])
    two.register_buffer("whole", two[0].weight.data)
    for network, name in ((one, "part"), (two, "whole"), (three, "scale")):
        with pytest.raises(ValueError, match=f"{name}.*share memory|share memory.*{name}"):
            find_permutations(network, X)


def test_memory_shared_by_tensors_that_stay_is_nobodys_business():
    network, table = mlp(), torch.randn(5, 8)
    for name, value in {"cos": table[:, ::2], "sin": table[:, 1::2], "mask": torch.ones(1, 5).expand(3, 5)}.items():
        network.register_buffer(name, value)
    assert round(2 ** find_permutations(network, X).log2_size()) == 720


class Buffered(nn.Module):
    def __init__(self, value, use):
        super().__init__()
        self.use = use
        self.register_buffer("value", value)

    def forward(self, x):
        return self.use(x, self.value)


def attend(h, mask):
    return torch.zeros(3, 3).masked_fill(mask.bool(), -torch.inf).softmax(-1) @ h


@pytest.mark.parametrize(
    ("value", "use"),
    [
        (
            torch.triu(torch.ones(3, 3), 1),
            lambda h, mask: torch.zeros(3, 3).masked_fill(mask.bool(), -torch.inf).softmax(-1) @ h,
        ),
        (torch.tensor([0.0, 1.0, 2.0]), lambda h, index: h[index.long()]),
        (torch.tensor([0.99, 0.999]), lambda h, share: h * (1 - share[0]).sqrt()),
        (torch.tensor([0.99]), lambda h, chance: h + torch.logit(chance)),
    ],
    ids=["mask", "index", "share", "chance"],
)
def test_buffers_that_mean_nothing_perturbed_are_no_reason_to_refuse(value, use):
    assert round(2 ** find_permutations(mlp(Buffered(value, use), nn.ReLU()), X).log2_size()) == 720


@pytest.mark.parametrize("wrap", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_weights_computed_into_attributes_move(wrap):
    with pytest.warns(FutureWarning) if wrap is nn.utils.weight_norm else nullcontext():
        network = nn.Sequential(wrap(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 2))
    assert round(2 ** find_permutations(network, X).log2_size()) == 720


@pytest.mark.parametrize(
    "give",
    [
        lambda one, two: (two, (two - two.mean(1, True)).mean(1)),
        lambda one, two: (two, (two[:, 0] > 1e9).long()),
        lambda one, two: (two, range(3), deque([two]), torch.device("cpu"), torch),
    ],
    ids=["zero up to rounding", "always class 0", "other things"],
)
def test_harmless_results_are_no_reason_to_refuse(give):
    assert round(2 ** find_permutations(Heads(give), X).log2_size()) == 720 * 120  # nobody returns the other head


def test_a_result_in_an_inherited_slot_stays_in_place():
    class Slotted:
        __slots__ = "hidden"

    class Result(Slotted):
        __slots__ = ("value",)

    def give(one, two):
        result = Result()
        result.hidden, result.value = one, two
        return result

    assert not any(("one.weight", 0) in axes for axes in find_permutations(Heads(give), X).perm_to_axes.values())


def test_decoders_that_return_their_cache_in_a_tuple_keep_their_heads_free():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    network = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(3, 40, (2, 6))
    call = {"input_ids": tokens, "use_cache": True}
    sizes = [find_permutations(network, {**call, "return_dict": flag}).log2_size() for flag in (True, False)]
    assert sizes[0] == sizes[1]


def test_networks_that_are_not_ready_are_refused_and_left_alone():
    lazy = nn.Sequential(nn.LazyLinear(6), nn.ReLU(), nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"0\.weight is not initialised"):
        find_permutations(lazy, X)
    assert isinstance(lazy[0], nn.LazyLinear)


def test_odd_parts_do_not_crash():
    sparse = mlp()
    sparse.register_buffer("adjacency", torch.eye(3).to_sparse())
    empty = mlp()
    empty.extra = nn.Parameter(torch.empty(0, 6))
    scripted = mlp(torch.jit.trace(nn.Tanh(), torch.ones(2)))
    for network in (sparse, scripted):
        assert round(2 ** find_permutations(network, X).log2_size()) == 720
    assert "extra" not in moving(find_permutations(nn.Sequential(empty[0], empty[1], empty[2]), X))


def test_an_axis_squeezed_in_place_is_followed():
    class Squeezing(nn.Module):
        def forward(self, x):
            return x[:, None].clone().squeeze_(1)

    assert round(2 ** find_permutations(mlp(Squeezing(), nn.ReLU()), X).log2_size()) == 720


def test_single_precision_complex_networks_are_checked_in_double():
    class Turning(nn.Module):
        def forward(self, x):
            return torch.polar(x.abs() + 1, x).real

    assert round(2 ** find_permutations(mlp(Turning(), nn.ReLU()), X).log2_size()) == 720


def test_a_row_move_of_a_large_tensor_at_an_odd_offset_is_right():
    matrix = torch.randn(1 + 2100 * 2048)[1:].view(2100, 2048)
    expected, rows = matrix.clone(), torch.randperm(2100)
    gather_([Move(matrix, 2100, 2048, 1, rows, None)])
    assert torch.equal(matrix, expected[rows])


def test_experts_in_one_tensor_are_followed():
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=40, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=16, head_dim=8,
    )  # fmt: skip
    network = transformers.MixtralForCausalLM(config)
    spec = find_permutations(network, torch.randint(3, 40, (2, 6)))
    assert spec.shuffle_ratio(network) > 0.9


class HoldsTensors(torch.optim.SGD):
    def __init__(self, parameters, **options):
        super().__init__(parameters, **options)
        self.averages = [each.detach().clone() for group in self.param_groups for each in group["params"]]


def test_shufflers_that_could_not_do_their_work_are_refused():
    network, other = mlp(), mlp()
    spec = find_permutations(network, X)
    with pytest.raises(ValueError, match="trains none of the parameters"):
        WeightShuffler(network, spec, torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="averages"):
        WeightShuffler(network, spec, HoldsTensors(network.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="moves nothing"):
        WeightShuffler(network, PermutationSpec((), {}, {}), torch.optim.SGD(network.parameters(), lr=0.1))


@pytest.mark.parametrize("what", ["network", "part", "optimizer", "both"])
def test_loading_what_was_just_shown_is_no_change(what):
    def trained(reload):
        network = mlp().double()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        shuffler = WeightShuffler(network, find_permutations(network, X.double()), optimizer, mode="on_release")
        for step in range(4):
            network(X.double()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1 and reload:
                shown = network.state_dict(), optimizer.state_dict()
                if what in ("network", "both"):
                    network.load_state_dict(shown[0])
                if what == "part":
                    network[2].load_state_dict(network[2].state_dict())
                if what in ("optimizer", "both"):
                    optimizer.load_state_dict(shown[1])
                again = network.state_dict()
                assert all(torch.equal(again[name], value) for name, value in shown[0].items())
                assert shuffler.shuffles == 1
        return network(X.double()).detach()

    assert float((trained(False) - trained(True)).abs().max()) < 1e-12
