"""Networks that hand functions to PyTorch are followed into these functions."""

from __future__ import annotations

import pytest
import torch
from helpers.hand_written_groups import symmetric
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._ops import HigherOrderOperator
from torch.nn.attention.flex_attention import flex_attention

from opacus_shuffle.permutation import find_permutations

HIDDEN = 6
FORWARD = {
    "cond": lambda net, h: torch.cond(h.sum() > 0, lambda h: net.one(h), lambda h: net.two(h).relu(), (h,)),
    "in order on one way": lambda net, h: torch.cond(h.sum() > 0, lambda h: net.one(h), lambda h: net.two(h).cumsum(-1), (h,)),
    "loop": lambda net, h: torch.while_loop(
        lambda i, h: i < 3, lambda i, h: (i + 1, net.one(net.two(h).tanh())), (torch.zeros((), dtype=torch.long), h)
    )[1],
    "map": lambda net, h: map_rows(lambda row: net.two(net.one(row).relu()), h),
    "prefixes": lambda net, h: associative_scan(lambda a, b: 0.5 * a + b, net.two(net.one(h)), 0, combine_mode="generic"),
    "scan": lambda net, h: scan(lambda sum, row: (net.one(sum + row).tanh(), net.two(sum.relu())), h[0], h)[1],
}
SIZES = {
    # Two ways: units before and after both are shared.
    "cond": 2 * symmetric(HIDDEN),
    "in order on one way": symmetric(HIDDEN),
    "loop": 2 * symmetric(HIDDEN),
    "map": 3 * symmetric(HIDDEN),
    "prefixes": 3 * symmetric(HIDDEN),
    "scan": 2 * symmetric(HIDDEN),
}


class Layers(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.up, self.down, self.middle = nn.Linear(4, HIDDEN), nn.Linear(HIDDEN, 3), FORWARD[name]
        self.one, self.two = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.middle(self, self.up(x).tanh())))


@pytest.mark.parametrize("name", FORWARD)
def test_functions_that_a_network_hands_over_are_followed_on_every_way(name):
    spec = find_permutations(Layers(name), torch.randn(5, 4))
    assert spec.log2_size() == pytest.approx(SIZES[name])
    assert (spec.unreached, spec.unknown) == ((), {})


class Flexible(nn.Module):
    """Causal attention with a slope over the distance, the same for all heads or one for each."""

    def __init__(self, heads: int, width: int, *, apart: bool) -> None:
        super().__init__()
        self.heads, self.apart = heads, apart
        self.embed, self.packed = nn.Linear(4, heads * width), nn.Linear(heads * width, 3 * heads * width)
        self.out = nn.Linear(heads * width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        embedded = self.embed(x)
        length = embedded[:, :, -1].shape[1]  # asked for its shape alone, so it keeps nothing in place
        packed = self.packed(embedded).unflatten(-1, (3, self.heads, -1))
        slopes = torch.arange(self.heads) if self.apart else torch.ones(self.heads)

        def score(score, batch, head, query, key):
            slope = slopes[head] if self.apart else 0.1
            return torch.where(query >= key, score - slope * (query - key) / length, -float("inf"))

        return self.out(flex_attention(*packed.movedim(-3, 0).transpose(-2, -3), score_mod=score).transpose(1, 2).flatten(2))


@pytest.mark.zoo
@pytest.mark.parametrize(("apart", "heads"), [(False, symmetric(2)), (True, 0.0)])
def test_flexible_attention_is_plain_attention_with_its_own_scores(apart, heads):
    spec = find_permutations(Flexible(2, 3, apart=apart), torch.randn(2, 8, 4))
    assert spec.log2_size() == pytest.approx(symmetric(6) + heads + 2 * 2 * symmetric(3))


def test_an_operation_that_nobody_can_look_into_is_refused_by_name_and_place():
    class Opaque(HigherOrderOperator):
        def __call__(self, function, x):
            return super().__call__(function, x)

    opaque = Opaque("opacus_shuffle_tests_opaque")
    opaque.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)(lambda function, x: function(x))
    opaque.py_autograd_impl(lambda function, x: function(x))

    class Handing(nn.Linear):
        def forward(self, x):
            return opaque(torch.relu, super().forward(x))

    with pytest.raises(
        ValueError, match=r"look into test_higher_order.py:\d+ \(opacus_shuffle_tests_opaque\).*plain operations"
    ):
        find_permutations(nn.Sequential(Handing(4, 6), nn.Linear(6, 2)), torch.randn(3, 4))
