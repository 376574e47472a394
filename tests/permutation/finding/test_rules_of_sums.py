"""Operations that sum by position or over pairs, and those that work along some axes alone, move what they treat alike."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers.between_layers import FREE, HIDDEN, STAYS, found
from helpers.hand_written_groups import symmetric
from helpers.model_zoo import Apply
from helpers.zoo import DOUBLE
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from opacus_shuffle.permutation import find_permutations


def two(h: torch.Tensor) -> torch.Tensor:
    return h.new_zeros(len(h), 2)


def positive(h: torch.Tensor) -> torch.Tensor:
    return (h > 0).long()


def with_written_diagonal(h: torch.Tensor, offset: int) -> torch.Tensor:
    matrix = h.new_zeros(HIDDEN, HIDDEN)
    matrix.diagonal(offset).fill_(2.0)
    return h @ matrix


def parity(h: torch.Tensor) -> torch.Tensor:
    return (torch.arange(len(h)) % 2)[:, None].expand_as(h)


SCATTERED = {
    "rows are summed": (lambda h: h.new_zeros(2, HIDDEN).scatter_add(0, parity(h), h)[parity(h)[:, 0]], FREE),
    "rows are put into zeros": (lambda h: h.new_zeros(len(h), HIDDEN).index_put((torch.arange(2),), h[:2]), FREE),
    "rows overwrite": (lambda h: h.new_zeros(2, HIDDEN).scatter(0, parity(h), h)[parity(h)[:, 0]], FREE),
    "units are summed by sign": (lambda h: two(h).scatter_add(1, positive(h), h), FREE),
    "units are multiplied by sign": (lambda h: two(h).scatter_reduce(1, positive(h), h, "prod", include_self=False), FREE),
    "the largest of a sign": (lambda h: two(h).scatter_reduce(1, positive(h), h, "amax"), FREE),
    "signs that occur": (lambda h: two(h).scatter(1, positive(h), 1.0), FREE),
    "the last of a sign": (lambda h: two(h).scatter(1, positive(h), h), STAYS),
    "units are summed by place": (lambda h: two(h).scatter_add(1, (torch.arange(HIDDEN) % 2).expand_as(h), h), STAYS),
    "into another unit": (lambda h: torch.zeros_like(h).scatter_add(1, (torch.arange(6) % 4).expand_as(h), h), STAYS),
    "fewer units than there are": (lambda h: two(h).scatter_add(1, positive(h)[:, :4], h), STAYS),
    "the one largest": (lambda h: F.one_hot(h.argmax(-1), HIDDEN).to(h) * h, STAYS),
}


@pytest.mark.parametrize("name", SCATTERED)
def test_what_is_summed_by_position_forgets_the_order_it_came_in(name):
    function, size = SCATTERED[name]
    assert found(function) == pytest.approx(size)


ALONG = {
    "a transform of places": (lambda h: torch.fft.fft(h.view(-1, 2, HIDDEN), dim=1).real.flatten(0, 1), FREE),
    "a transform of real places": (lambda h: torch.fft.irfft(torch.fft.rfft(h.view(-1, 2, 6), dim=1), n=2, dim=1)[:, 0], FREE),
    "a transform of units": (lambda h: torch.fft.rfft(h).real, STAYS),
    "a transform of both": (lambda h: torch.fft.fft2(h.view(-1, 2, HIDDEN)).real.flatten(0, 1), STAYS),
    "norms of records": (lambda h: h.renorm(2, 0, 0.5), FREE),
    "norms of records and places": (lambda h: (h * torch.arange(6)).renorm(2, 0, 0.5), STAYS),
    "in steps": (lambda h: torch.bucketize(h, torch.linspace(-1, 1, 4).to(h)).to(h), FREE),
    "units as the steps": (lambda h: torch.searchsorted(h.exp().cumsum(-1), h[:, :1].contiguous()).to(h), STAYS),
    "a diagonal matrix": (lambda h: torch.diag_embed(h).sum(-1), FREE),
    "beside the diagonal": (lambda h: torch.diag_embed(h, offset=1).sum(-1), STAYS),
    "the diagonal of a square": (lambda h: (h.T @ h).diagonal().expand_as(h) * h, FREE),
    "beside the diagonal of a square": (lambda h: h[:, 1:] * (h.T @ h).diagonal(offset=1), STAYS),
    "a diagonal written to zeros": (lambda h: with_written_diagonal(h, 0), FREE),
    "written to zeros beside the diagonal": (lambda h: with_written_diagonal(h, 1), STAYS),
    "a slope of all units": (lambda h: h * torch.func.jacrev(lambda x: x.tanh().sum(0))(h).sum(0), FREE),
    "the slope of the first unit": (lambda h: h * torch.func.jacrev(lambda x: x.tanh().sum(0))(h)[0].sum(0), STAYS),
    "the trace of a square": (lambda h: h * torch.trace(h.T @ h), FREE),
    "masked by a tensor in place": (lambda h: h.clone().masked_fill_(h > 0, torch.tensor(0.5).double()), FREE),
    "rows put in by a mask": (
        lambda h: (2 * h).masked_scatter((h.sum(-1, keepdim=True) > 0).expand_as(h), h.flip(0)),
        FREE,
    ),
    "units put in by a mask": (lambda h: h.masked_scatter(h > 0, h.flip(0)), STAYS),
    "gates between": (lambda h: h[:, ::2].sigmoid() * h[:, 1::2], symmetric(3) + STAYS),
    "sequences of several lengths": (
        lambda h: pack_padded_sequence(h[None], torch.tensor([len(h)]), batch_first=True).data,
        FREE,
    ),
    "sequences taken apart": (
        lambda h: pad_packed_sequence(pack_padded_sequence(h[None], torch.tensor([len(h)]), batch_first=True))[0][:, 0],
        FREE,
    ),
    "a derivative of a derivative": (lambda h: torch.func.vmap(torch.func.jacfwd(lambda u: (u * u.tanh()).sum()))(h), FREE),
    "folded": (lambda h: F.fold(h[:, :, None].expand(-1, -1, 2), (1, 3), (1, 2))[:, :, 0].flatten(1), symmetric(3) + STAYS),
}


@pytest.mark.parametrize("name", ALONG)
def test_units_move_along_axes_that_an_operation_does_not_mix(name):
    function, size = ALONG[name]
    assert found(function) == pytest.approx(size)


class Codebook(nn.Module):
    """How far its inputs are from each of some codes."""

    def __init__(self, norm: float, weights: bool) -> None:
        super().__init__()
        self.codes, self.norm = nn.Parameter(torch.randn(4, HIDDEN)), norm
        self.weights = torch.arange(HIDDEN) if weights else torch.ones(())

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return torch.cdist(h * self.weights, self.codes, p=self.norm)


@pytest.mark.parametrize("norm", [1.0, 2.0, 3.0, float("inf")])
def test_distances_treat_all_coordinates_alike_and_name_no_code_by_its_place(norm):
    assert found(Codebook(norm, weights=False)) == pytest.approx(FREE + symmetric(4))
    assert found(Codebook(norm, weights=True)) == pytest.approx(STAYS + symmetric(4))


def test_distances_of_pairs_keep_the_rows_and_move_their_coordinates():
    rows = [lambda h: torch.pdist(h).sum() * h, lambda h: torch.pdist(h.T.contiguous()).sum(-1, keepdim=True) * h[:, :1]]
    assert [found(each) for each in rows] == pytest.approx([FREE, STAYS])


@pytest.mark.parametrize("product", [torch.mm, torch.sparse.mm, lambda one, other: torch.sparse.addmm(other, one, other)])
def test_a_sparse_matrix_moves_no_place_that_it_mixes(product):
    graphs = [torch.eye(size, dtype=torch.float64).roll(1, 0).to_sparse() for size in (4, HIDDEN)]
    assert found(lambda h: product(graphs[0], h[:4])) == pytest.approx(FREE)
    assert found(lambda h: product(graphs[1], h.T).T) == pytest.approx(STAYS)


def test_channels_of_grouped_transposed_convolutions_move_inside_their_groups_and_groups_as_one():
    def size(*after: nn.Module) -> float:
        torch.manual_seed(0)
        layers = [nn.Conv1d(3, 4, 1), nn.Tanh(), nn.ConvTranspose1d(4, 6, 2, groups=2), *after, nn.Tanh(), nn.Conv1d(6, 2, 1)]
        return find_permutations(nn.Sequential(*layers).double(), torch.randn(2, 3, 5).double()).log2_size()

    inside = 2 * symmetric(2) + 2 * symmetric(3)
    assert size() == pytest.approx(symmetric(2) + inside)
    weights = torch.tensor([1.0, 2.0]).double()[:, None, None]
    assert size(Apply(lambda h: (h.unflatten(-2, (2, 3)) * weights).flatten(-3, -2))) == pytest.approx(inside)
    assert size(Apply(lambda h: h * torch.arange(6)[:, None])) == pytest.approx(2 * symmetric(2))


def test_columns_of_a_table_with_a_largest_norm_move_and_its_rows_come_back_as_long_as_they_were():
    def table(**options) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(5, HIDDEN, **options), nn.Tanh(), nn.Linear(HIDDEN, 3)).double()

    network, tokens = table(max_norm=0.5), torch.tensor([[0, 3, 1], [2, 2, 4]])
    before = network[0].weight.detach().clone()
    spec = find_permutations(network, tokens)
    assert spec.log2_size() == pytest.approx(symmetric(HIDDEN))
    assert torch.equal(network[0].weight, before)
    moved = copy.deepcopy(network)
    spec.apply_(moved, spec.sample(torch.Generator().manual_seed(1)))
    torch.testing.assert_close(moved(tokens), network(tokens), rtol=DOUBLE, atol=DOUBLE)


@pytest.mark.parametrize("compare", [F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits])
def test_losses_inside_a_network_compare_entry_by_entry(compare):
    numbers = torch.arange(HIDDEN).double() / 9
    for reduction in ("mean", "none"):
        assert found(lambda h, how=reduction: h * compare(h, h.sigmoid(), reduction=how)) == pytest.approx(FREE)
        assert found(lambda h, how=reduction: h * compare(h, numbers.expand_as(h), reduction=how)) == pytest.approx(STAYS)
