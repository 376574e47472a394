"""Values that leave PyTorch or are kept after the pass keep their axes in place."""

import copy
import pickle
import types

import pytest
import torch
from helpers.model_zoo import Apply, Wired
from helpers.perceptron import X, mlp
from torch import nn

from opacus_shuffle.permutation import find_permutations


def test_values_that_leave_pytorch_keep_their_axes_in_place_and_the_others_move():
    leaving = Apply(lambda x: torch.tensor(x.tolist(), dtype=x.dtype))
    spec = find_permutations(
        nn.Sequential(*mlp(leaving, nn.ReLU())[:-1], nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)),
        X,
    )
    assert round(2 ** spec.log2_size()) == 120
    assert "Tensor.tolist" in spec.describe()


def two_layers(way):
    """Six hidden units between two layers, and a function of the network and of these units."""

    def forward(net, x):
        return way(net, torch.relu(net.one(x)))

    return Wired(forward, one=nn.Linear(4, 6), two=nn.Linear(6, 3), shift=torch.ones(6))


def written_to_a_result(net, h):
    out = torch.zeros(len(h), 3)
    out[:, 0] = h[:, 0]
    return out + net.two(h)


def compared_with_a_pattern(net, h):
    return net.two(2 * h if torch.equal(h[0] > 0, torch.arange(6) > 3) else h)


def written_to_in_a_list(net, h):
    torch._foreach_add_([h], [torch.arange(6.0).expand_as(h)])
    return net.two(h)


def filled_as_an_array(net, h):
    offsets = torch.zeros(6)
    offsets.numpy()[:] = range(6)
    return net.two(h * (1 + offsets))


def assigned_to_the_data_of_a_weight(net, h):
    net.shift.data = torch.arange(6.0)
    return net.two(h + net.shift)


def seen_by_its_storage(net, h):
    return net.two(torch.empty(0).set_(h.untyped_storage(), 0, h.shape, h.stride()).sin())


def deeply_copied(net, h):
    return net.two(copy.deepcopy(h.detach()))


def pickled(net, h):
    return net.two(pickle.loads(pickle.dumps(h.detach())))


@pytest.mark.parametrize(
    "way",
    [
        written_to_a_result,
        compared_with_a_pattern,
        written_to_in_a_list,
        filled_as_an_array,
        assigned_to_the_data_of_a_weight,
        seen_by_its_storage,
        deeply_copied,
        pickled,
    ],
)
def test_units_whose_values_take_a_way_that_no_operation_shows_stay(way):
    with pytest.raises(ValueError, match="no axis"):
        find_permutations(two_layers(way), torch.randn(5, 4))


def test_the_error_says_what_fixed_each_tensor_and_at_which_line():
    largest = Apply(lambda x: x * (x.argsort(-1) > 2))
    with pytest.raises(
        ValueError,
        match=r"0\.weight: axis 0: test_trace\.py:\d+ \(sort\) of 1.* Leave shuffle_weights out",
    ):
        find_permutations(
            nn.Sequential(nn.Linear(4, 6), largest, nn.Linear(6, 3)), torch.randn(5, 4)
        )


# Activations that are kept after the pass
# ------------------------------------------------------------------------------------------

KEPT: list[torch.Tensor] = []
MEMORY = types.SimpleNamespace()


@pytest.mark.parametrize(
    "keep",
    [
        lambda net, h: KEPT.append(h),
        lambda net, h: setattr(MEMORY, "last", h),
        lambda net, h: setattr(net, "views", [(h.unflatten(1, (2, 3)),)]),
    ],
    ids=["a global", "an object", "a list of views"],
)
def test_an_activation_that_is_kept_stays(keep):
    def way(net, h):
        keep(net, h)
        return net.two(h + net.shift)

    with pytest.raises(ValueError, match="an activation that is kept after the pass"):
        find_permutations(two_layers(way), torch.randn(5, 4))


def test_an_activation_that_only_a_cycle_of_references_keeps_may_move():
    def way(net, h):
        cycle = [h]
        cycle.append(cycle)
        return net.two(h + net.shift)

    assert round(2 ** find_permutations(two_layers(way), torch.randn(5, 4)).log2_size()) == 720
