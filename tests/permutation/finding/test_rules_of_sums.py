"""Operations that sum by position or over pairs, and those that work along some axes alone, move what they treat alike."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.between_layers import FREE, HIDDEN, STAYS, found
from helpers.hand_written_groups import symmetric
from helpers.model_zoo import Apply
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from opacus_shuffle.permutation import find_permutations


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
    assert found(function) == pytest.approx(size)


ALONG = {
    "a transform of places": (
        lambda h: torch.fft.fft(h.view(-1, 2, HIDDEN), dim=1).real.flatten(0, 1),
        FREE,
    ),
    "a transform of real places": (
        lambda h: torch.fft.irfft(torch.fft.rfft(h.view(-1, 2, 6), dim=1), n=2, dim=1)[:, 0],
        FREE,
    ),
    "a transform of units": (lambda h: torch.fft.rfft(h).real, STAYS),
    "a transform of both": (
        lambda h: torch.fft.fft2(h.view(-1, 2, HIDDEN)).real.flatten(0, 1),
        STAYS,
    ),
    "masked by a tensor in place": (
        lambda h: h.clone().masked_fill_(h > 0, torch.tensor(0.5).double()),
        FREE,
    ),
    "gates between": (lambda h: h[:, ::2].sigmoid() * h[:, 1::2], symmetric(3) + STAYS),
    "sequences of several lengths": (
        lambda h: pack_padded_sequence(h[None], torch.tensor([len(h)]), batch_first=True).data,
        FREE,
    ),
    "sequences taken apart": (
        lambda h: pad_packed_sequence(
            pack_padded_sequence(h[None], torch.tensor([len(h)]), batch_first=True)
        )[0][:, 0],
        FREE,
    ),
}


@pytest.mark.parametrize("name", ALONG)
def test_units_move_along_axes_that_an_operation_does_not_mix(name):
    function, size = ALONG[name]
    assert found(function) == pytest.approx(size)


@pytest.mark.parametrize(
    "product", [torch.mm, torch.sparse.mm, lambda one, other: torch.sparse.addmm(other, one, other)]
)
def test_a_sparse_matrix_moves_no_place_that_it_mixes(product):
    graphs = [torch.eye(size, dtype=torch.float64).roll(1, 0).to_sparse() for size in (4, HIDDEN)]
    assert found(lambda h: product(graphs[0], h[:4])) == pytest.approx(FREE)
    assert found(lambda h: product(graphs[1], h.T).T) == pytest.approx(STAYS)


def test_channels_of_grouped_transposed_convolutions_move_inside_their_groups_and_groups_as_one():
    def size(*after: nn.Module) -> float:
        torch.manual_seed(0)
        layers = [
            nn.Conv1d(3, 4, 1),
            nn.Tanh(),
            nn.ConvTranspose1d(4, 6, 2, groups=2),
            *after,
            nn.Tanh(),
            nn.Conv1d(6, 2, 1),
        ]
        return find_permutations(
            nn.Sequential(*layers).double(), torch.randn(2, 3, 5).double()
        ).log2_size()

    inside = 2 * symmetric(2) + 2 * symmetric(3)
    assert size() == pytest.approx(symmetric(2) + inside)
    weights = torch.tensor([1.0, 2.0]).double()[:, None, None]
    assert size(
        Apply(lambda h: (h.unflatten(-2, (2, 3)) * weights).flatten(-3, -2))
    ) == pytest.approx(inside)
    assert size(Apply(lambda h: h * torch.arange(6)[:, None])) == pytest.approx(2 * symmetric(2))
