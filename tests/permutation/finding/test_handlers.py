"""Modules that tracing cannot see into: in place without a handler, permuted with one, refused with a wrong one."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from helpers.hand_written_groups import symmetric
from torch import nn

from opacus_shuffle.permutation import ModuleAxes, find_permutations, register_permutation
from opacus_shuffle.permutation.finding import handlers

EXACT = 1e-12  # sums of some hundred terms of size 1 in double precision


@pytest.fixture(autouse=True)
def own_handlers(monkeypatch):
    """What a test registers ends with it."""
    monkeypatch.setattr(handlers, "_HANDLERS", dict(handlers._HANDLERS))


@torch.library.custom_op("opacus_shuffle_tests::two_layers", mutates_args=())
def two_layers(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, gain: torch.Tensor
) -> torch.Tensor:
    return torch.relu(x @ up.T) * gain @ down.T


class Opaque(nn.Module):
    """A hidden layer inside of one operator that nobody can look into."""

    def __init__(self, width: int = 6, hidden: int = 9) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Parameter(torch.randn(hidden, width)),
            nn.Parameter(torch.randn(width, hidden)),
        )
        self.register_buffer("gain", torch.rand(hidden) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return two_layers(x, self.up, self.down, self.gain)


class Derived(Opaque):
    pass


PARAMETERS = {"up": "unit in", "down": "out unit", "gain": "unit"}


def around(*opaque: nn.Module, width: int = 6) -> nn.Sequential:
    """A network with opaque modules between linear layers, in double precision with random weights."""
    layers = [
        nn.Linear(4, 7),
        nn.Tanh(),
        nn.Linear(7, width),
        nn.Tanh(),
        *opaque,
        nn.Linear(width, 3),
    ]
    return nn.Sequential(*layers).double()


@pytest.fixture(autouse=True)
def repeatable():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def keeps_its_function(network: nn.Module, spec, x: torch.Tensor) -> bool:
    """Whether outputs stay, and whether weights move."""
    moved = copy.deepcopy(network)
    spec.apply_(moved, spec.sample(torch.Generator().manual_seed(1)))
    assert any(
        not torch.equal(one, two)
        for one, two in zip(network.parameters(), moved.parameters(), strict=True)
    )
    return float((moved(x) - network(x)).detach().abs().max()) <= EXACT * float(
        network(x).detach().abs().max()
    )


INPUT = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(9))


def test_without_a_handler_what_the_operator_touches_stays_in_place():
    spec = find_permutations(around(Opaque()), INPUT)
    assert spec.log2_size() == pytest.approx(symmetric(7))
    assert not any(name.startswith("4.") for name in spec.blocks)


@pytest.mark.parametrize(
    ("inputs", "outputs", "bits"),
    [
        ("... in", "... out", symmetric(7) + symmetric(6) + symmetric(9) + symmetric(6)),
        ("... _", "... out", symmetric(7) + symmetric(9) + symmetric(6)),
        ("_ in", "_ out", symmetric(7) + symmetric(6) + symmetric(9) + symmetric(6)),
        ("... _", "... _", symmetric(7) + symmetric(9)),
    ],
)
def test_with_a_handler_its_axes_take_part(inputs, outputs, bits):
    @register_permutation(Opaque)
    def axes(module):
        return ModuleAxes(PARAMETERS, inputs=inputs, outputs=outputs)

    # an axis inside of the pattern that is neither in the inputs nor in the outputs ends there:
    # "in" is then free by itself
    network = around(Opaque(), nn.Tanh())
    parameters = dict(PARAMETERS)
    if "in" not in inputs:
        parameters["up"] = "unit _"
    if "out" not in outputs:
        parameters["down"] = "_ unit"
    register_permutation(Opaque)(
        lambda module: ModuleAxes(parameters, inputs=inputs, outputs=outputs)
    )
    spec = find_permutations(network, INPUT)
    assert spec.log2_size() == pytest.approx(bits)
    assert "4.gain" in spec.buffers
    assert keeps_its_function(network, spec, INPUT)


@pytest.mark.parametrize(
    "parameters",
    [
        {"up": "unit in", "down": "out unit"},
        {"up": "unit in", "gain": "unit"},
        {"up": "unit in", "down": "unit out", "gain": "_"},
        {"up": "unit in", "down": "in unit", "gain": "unit"},
    ],
    ids=["gain forgotten", "down forgotten", "axes of down swapped", "inputs taken for outputs"],
)
def test_a_wrong_handler_is_refused_by_the_check(parameters):
    sizes = {"width": 9, "hidden": 9} if parameters.get("down") == "unit out" else {}
    register_permutation(Opaque)(
        lambda module: ModuleAxes(parameters, inputs="... in", outputs="... out")
    )
    network = around(Opaque(**sizes), nn.Tanh(), width=sizes.get("width", 6))
    with pytest.raises(ValueError, match=r"changes what Sequential computes.*register_permutation"):
        find_permutations(network, INPUT)


def test_a_handler_that_returns_none_has_the_module_traced():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))

        def forward(self, x):
            return self.layers(x)

    calls = []
    network = around(Plain())
    expected = find_permutations(network, INPUT)
    register_permutation(Plain)(calls.append)
    assert find_permutations(network, INPUT) == expected
    assert calls
    assert all(type(each) is Plain for each in calls)


def test_a_handler_may_decide_by_the_module():
    register_permutation(Opaque)(
        lambda module: (
            ModuleAxes(PARAMETERS, "... in", "... out") if module.up.shape[0] == 9 else None
        )
    )
    network = around(Opaque(hidden=9), nn.Tanh(), Opaque(hidden=5))
    spec = find_permutations(network, INPUT)
    assert any(name.startswith("4.") for name in spec.blocks)
    assert not any(name.startswith("6.") for name in spec.blocks)
    assert keeps_its_function(network, spec, INPUT)


def test_subclasses_need_their_own():
    register_permutation(Opaque)(lambda module: ModuleAxes(PARAMETERS, "... in", "... out"))
    assert find_permutations(around(Derived()), INPUT).log2_size() == pytest.approx(symmetric(7))
    register_permutation(Derived)(lambda module: ModuleAxes(PARAMETERS, "... in", "... out"))
    assert find_permutations(around(Derived()), INPUT).log2_size() > symmetric(7) + symmetric(9)


@pytest.mark.parametrize("kind", [None, 3, "Linear", int, nn.Linear(2, 2)])
def test_only_classes_of_modules_can_be_registered(kind):
    with pytest.raises(ValueError, match="class of modules"):
        register_permutation(kind)


@pytest.mark.parametrize(
    ("axes", "match"),
    [
        (ModuleAxes({"up": "unit in more"}, "... in", "... out"), r"unit in more.*\(9, 6\)"),
        (ModuleAxes({"up": "unit"}, "... in", "... out"), r"'unit'.*\(9, 6\)"),
        (ModuleAxes({"up": "(unit in"}, "... in", "... out"), r"\(unit in' has '\('"),
        (ModuleAxes({"up": "unit) in"}, "... in", "... out"), r"unit\) in' has '\)'"),
        (ModuleAxes({"upp": "unit in"}, "... in", "... out"), "'upp'.*up"),
        (
            ModuleAxes({"up": "(gate unit) in"}, "... in", "... out", sizes={"gate": 4}),
            "gate unit.*size 9",
        ),
        (ModuleAxes({"up": "(a b) in"}, "... in", "... out"), "'a b'.*size 9"),
        (ModuleAxes({"up": "unit in", "down": "out in"}, "... in", "... out"), "'in'.*size 9"),
        (ModuleAxes(PARAMETERS, "_ _ in", "... out"), r"_ _ in.*\(5, 6\)"),
        (ModuleAxes(PARAMETERS, "... in", "out"), r"'out'.*\(5, 6\)|'out' of size 5"),
        (ModuleAxes(PARAMETERS, "... in", "_ _ out"), r"_ _ out.*\(5, 6\)"),
        (ModuleAxes(PARAMETERS, "... in", "... _ _ out"), r"_ _ out.*\(5, 6\)"),
        (ModuleAxes(PARAMETERS, "in ...", "... out"), r"in \.\.\."),
        (ModuleAxes(PARAMETERS | {"up": "(unit unit) in"}, "... in", "... out"), "unit unit"),
        (ModuleAxes(PARAMETERS | {"up": "((unit)) in"}, "... in", "... out"), r"\(\(unit\)\)"),
        (ModuleAxes(PARAMETERS, "... in", "... out", sizes={"unit": 0}), "unit"),
        ("unit in", "Opaque.*ModuleAxes.*str"),
    ],
    ids=itertools.count(),
)
def test_patterns_that_do_not_fit_are_named(axes, match):
    register_permutation(Opaque)(lambda module: axes)
    with pytest.raises(ValueError, match=match):
        find_permutations(around(Opaque(), nn.Tanh()), INPUT)


def test_the_network_is_left_as_it_was_even_when_a_handler_fails():
    network = around(Opaque())
    for axes in (ModuleAxes(PARAMETERS, "... in", "... out"), ModuleAxes({"up": "unit"})):
        register_permutation(Opaque)(lambda module, axes=axes: axes)
        with (
            pytest.raises(ValueError, match="unit")
            if "down" not in axes.parameters
            else torch.no_grad()
        ):
            find_permutations(network, INPUT)
        assert "forward" not in vars(network[4])


# Fused layers
# -----------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("opacus_shuffle_tests::fused_lstm", mutates_args=())
def fused_lstm(
    x: torch.Tensor, w_ih: torch.Tensor, w_hh: torch.Tensor, b_ih: torch.Tensor, b_hh: torch.Tensor
) -> torch.Tensor:
    start = x.new_zeros(1, x.shape[0], w_hh.shape[1])
    return torch.lstm(
        x, (start, start), [w_ih, w_hh, b_ih, b_hh], True, 1, 0.0, False, False, True
    )[0].clone()


class FusedLSTM(nn.Module):
    """One layer of an LSTM, whose states go from step to step inside of one operator."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w_ih, self.w_hh = (
            nn.Parameter(torch.randn(4 * hidden, width)),
            nn.Parameter(torch.randn(4 * hidden, hidden)),
        )
        self.b_ih, self.b_hh = (
            nn.Parameter(torch.randn(4 * hidden)),
            nn.Parameter(torch.randn(4 * hidden)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fused_lstm(x, self.w_ih, self.w_hh, self.b_ih, self.b_hh)


GATES = {
    "w_ih": "(gate unit) in",
    "w_hh": "(gate unit) unit",
    "b_ih": "(gate unit)",
    "b_hh": "(gate unit)",
}


def recurrent(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), layer, nn.Linear(5, 3)).double()


def test_axes_made_of_several_are_permuted_inside_every_part():
    register_permutation(FusedLSTM)(
        lambda module: ModuleAxes(GATES, "... in", "... unit", sizes={"gate": 4}, fixed=("gate",))
    )
    network, x = recurrent(FusedLSTM(6, 5)), torch.randn(2, 3, 4, dtype=torch.float64)
    spec = find_permutations(network, x)
    assert spec.log2_size() == pytest.approx(symmetric(6) + symmetric(5))
    assert keeps_its_function(network, spec, x)
    numbered = copy.deepcopy(network)
    with torch.no_grad():
        numbered[2].b_ih.copy_(torch.arange(20))
        numbered[2].w_hh.copy_(torch.arange(100).view(20, 5))
    spec.apply_(numbered, spec.sample(torch.Generator().manual_seed(3)))
    gates = numbered[2].b_ih.detach().view(4, 5).long()
    assert torch.equal(gates - 5 * torch.arange(4)[:, None], gates[0].expand(4, 5))
    assert sorted(gates[0].tolist()) == list(range(5)) != gates[0].tolist()
    expected = 5 * gates.flatten()[:, None] + gates[0]
    assert torch.equal(numbered[2].w_hh.detach().long(), expected)


@pytest.mark.parametrize(
    "change",
    [
        {"fixed": ()},
        {"parameters": GATES | {"b_hh": "_"}},
        {"parameters": GATES | {"w_hh": "(gate unit) other"}},
        {
            "parameters": {
                name: pattern.replace("(gate unit)", "(unit gate)")
                for name, pattern in GATES.items()
            }
        },
        {"outputs": "... free"},
    ],
    ids=[
        "gates permuted",
        "bias forgotten",
        "states apart",
        "minor and major swapped",
        "output apart",
    ],
)
def test_mistakes_in_a_recurrent_layer_are_found_by_the_check(change):
    right = {
        "parameters": GATES,
        "inputs": "... in",
        "outputs": "... unit",
        "sizes": {"gate": 4},
        "fixed": ("gate",),
    }
    register_permutation(FusedLSTM)(lambda module: ModuleAxes(**{**right, **change}))
    with pytest.raises(ValueError, match="changes what Sequential computes"):
        find_permutations(recurrent(FusedLSTM(6, 5)), torch.randn(2, 3, 4, dtype=torch.float64))


def test_declared_modules_may_share_weights_with_traced_ones():
    register_permutation(Opaque)(lambda module: ModuleAxes(PARAMETERS, "... in", "... out"))
    network = around(
        Opaque(width=6, hidden=9), nn.Linear(6, 9, bias=False), nn.Tanh(), nn.Linear(9, 6)
    )
    network[5].weight = network[4].up
    spec = find_permutations(network, INPUT)
    assert spec.aliases == {"4.up": ("5.weight",)}
    assert keeps_its_function(network, spec, INPUT)
