"""Values that leave PyTorch or outlive the pass keep their axes in place, and say so."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from helpers.perceptron import X, mlp
from torch import nn

from opacus_shuffle.permutation import find_permutations


def test_values_that_leave_pytorch_keep_their_axes_in_place_and_the_others_move():
    class Leaving(nn.Module):
        def forward(self, x):
            return torch.tensor(x.tolist(), dtype=x.dtype)

    spec = find_permutations(
        nn.Sequential(*mlp(Leaving(), nn.ReLU())[:-1], nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)),
        X,
    )
    assert round(2 ** spec.log2_size()) == 120
    assert "Tensor.tolist" in spec.describe()


def test_what_is_written_to_a_tensor_that_is_returned_counts():
    class Writing(nn.Module):
        def forward(self, x):
            h, out = torch.relu(self.one(x)), torch.zeros(len(x), 3)
            out[:, 0] = h[:, 0]
            return out + self.two(h)

        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 3)

    with pytest.raises(ValueError, match="no axis"):
        find_permutations(Writing(), torch.randn(5, 4))


def compared_with_a_pattern(net, h):
    return 2 * h if torch.equal(h[0] > 0, torch.arange(6) > 3) else h


def written_to_in_a_list(net, h):
    if h.sum() > 1e6:  # no numerical check gets here
        torch._foreach_add_([h], [torch.arange(6.0).expand_as(h)])
    return h


def filled_as_an_array(net, h):
    places = torch.zeros(6)
    if h.sum() > 1e6:
        places.numpy()[:] = range(6)
    return h * (1 + places)


def shown_in_place_of_a_weight(net, h):
    if h.sum() > 1e6:
        net.shift.data = torch.arange(6.0)
    return h


@pytest.mark.parametrize(
    "change",
    [compared_with_a_pattern, written_to_in_a_list, filled_as_an_array, shown_in_place_of_a_weight],
)
def test_what_returns_no_tensor_keeps_its_axes_in_place(change):
    class Changing(nn.Module):
        def forward(self, x):
            return self.two(change(self, torch.relu(self.one(x))) + self.shift)

        def __init__(self):
            super().__init__()
            self.one, self.two, self.shift = (
                nn.Linear(4, 6),
                nn.Linear(6, 3),
                nn.Parameter(torch.ones(6)),
            )

    with pytest.raises(ValueError, match="no axis"):
        find_permutations(Changing(), torch.randn(5, 4))


class Hiding(nn.Module):
    """Where no numerical check gets, its units are hidden, and used under another name."""

    def __init__(self, hide):
        super().__init__()
        self.hide, self.one, self.two, self.three = (
            hide,
            nn.Linear(4, 6),
            nn.Linear(6, 3),
            nn.Linear(6, 3),
        )

    def forward(self, x):
        out = self.two(torch.relu(self.one(x)))
        return out + self.three(self.hide(self.one(x))) if out.sum() > 1e6 else out


@pytest.mark.parametrize(
    "hide",
    [
        lambda h: torch.empty(0).set_(h.untyped_storage(), 0, h.shape, h.stride()).sin(),
        lambda h: copy.deepcopy(h.detach()),
        lambda h: pickle.loads(pickle.dumps(h.detach())),
    ],
    ids=["storage", "copy", "pickle"],
)
def test_what_is_copied_out_of_sight_stays(hide):
    with pytest.raises(ValueError, match="no axis"):
        find_permutations(Hiding(hide), torch.randn(5, 4))


def test_the_error_for_a_network_in_which_nothing_moves_says_what_fixed_its_tensors_and_where():
    class Largest(nn.Module):
        def forward(self, x):
            return x * (x.argsort(-1) > 2)

    with pytest.raises(
        ValueError,
        match=r"0\.weight: axis 0: test_trace\.py:\d+ \(sort\) of 1.* Leave shuffle_weights out",
    ):
        find_permutations(
            nn.Sequential(nn.Linear(4, 6), Largest(), nn.Linear(6, 3)), torch.randn(5, 4)
        )


# What outlives the pass
# ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Memory:
    """A plain object that keeps an activation."""

    last: torch.Tensor | None = None


KEPT: list[torch.Tensor] = []


def keep_in_a_global(net, h):
    KEPT[:] = [h]


def keep_in_a_dataclass(net, h):
    net.memory.last = h


def keep_in_a_closure(net, h):
    net.remember(h)


def keep_a_list_of_views(net, h):
    net.views = [(h.unflatten(1, (2, 3)),)]


class Keeping(nn.Module):
    """A network that keeps its hidden units for a loss to read."""

    def __init__(self, keep):
        super().__init__()
        self.keep, self.one, self.two = keep, nn.Linear(4, 6), nn.Linear(6, 3)
        self.memory = Memory()
        closed: list[torch.Tensor] = []
        self.remember = lambda h: closed.append(h)

    def forward(self, x):
        h = torch.relu(self.one(x))
        self.keep(self, h)
        return self.two(h)


@pytest.mark.parametrize(
    "keep",
    [
        keep_in_a_global,
        keep_in_a_dataclass,
        keep_in_a_closure,
        keep_a_list_of_views,
    ],
)
def test_an_activation_that_is_kept_stays_wherever_it_is_kept(keep):
    with pytest.raises(ValueError, match="an activation that is kept after the pass"):
        find_permutations(Keeping(keep), torch.randn(5, 4))


def test_activations_that_nothing_but_their_own_circle_keeps_may_move():
    def keep_in_a_circle(net, h):
        circle = [h]
        circle.append(circle)

    assert (
        round(2 ** find_permutations(Keeping(keep_in_a_circle), torch.randn(5, 4)).log2_size())
        == 720
    )
