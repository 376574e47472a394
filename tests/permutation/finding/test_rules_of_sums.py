"""Operations that sum by position, or work along some axes alone, move what they treat alike."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.between_layers import FREE, HIDDEN, STAYS, bits_between
from helpers.hand_written_groups import symmetric


def two(h: torch.Tensor) -> torch.Tensor:
    return h.new_zeros(len(h), 2)


def positive(h: torch.Tensor) -> torch.Tensor:
    return (h > 0).long()


SCATTERED = {
    "rows are put into zeros": (
        lambda h: h.new_zeros(len(h), HIDDEN).index_put((torch.arange(2),), h[:2]),
        FREE,
    ),
    "units are summed by place": (
        lambda h: two(h).scatter_add(1, (torch.arange(HIDDEN) % 2).expand_as(h), h),
        STAYS,
    ),
    "into another unit": (
        lambda h: torch.zeros_like(h).scatter_add(1, (torch.arange(6) % 4).expand_as(h), h),
        STAYS,
    ),
    "fewer units than there are": (lambda h: two(h).scatter_add(1, positive(h)[:, :4], h), STAYS),
    "the one largest": (lambda h: F.one_hot(h.argmax(-1), HIDDEN).to(h) * h, STAYS),
}


@pytest.mark.parametrize("name", SCATTERED)
def test_what_is_summed_by_position_forgets_the_order_it_came_in(name):
    function, size = SCATTERED[name]
    assert bits_between(function) == pytest.approx(size)


ALONG = {
    "masked by a tensor in place": (
        lambda h: h.clone().masked_fill_(h > 0, torch.tensor(0.5).double()),
        FREE,
    ),
    "gates between": (lambda h: h[:, ::2].sigmoid() * h[:, 1::2], symmetric(3) + STAYS),
}


@pytest.mark.parametrize("name", ALONG)
def test_units_move_along_axes_that_an_operation_does_not_mix(name):
    function, size = ALONG[name]
    assert bits_between(function) == pytest.approx(size)


@pytest.mark.parametrize(
    "product", [torch.mm, torch.sparse.mm, lambda one, other: torch.sparse.addmm(other, one, other)]
)
def test_a_sparse_matrix_moves_no_place_that_it_mixes(product):
    graphs = [torch.eye(size, dtype=torch.float64).roll(1, 0).to_sparse() for size in (4, HIDDEN)]
    assert bits_between(lambda h: product(graphs[0], h[:4])) == pytest.approx(FREE)
    assert bits_between(lambda h: product(graphs[1], h.T).T) == pytest.approx(STAYS)
