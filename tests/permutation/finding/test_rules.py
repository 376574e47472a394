"""Operations are followed by their rules; those without one keep in place what they touch.

Each rule holds: permuting operands permutes results, also with ties and infinities.
"""

import copy
import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import hand_written_groups as by_hand
from helpers.labelled_operations import Function, Operation, breaks, labelled
from helpers.model_zoo import Apply, Wired
from helpers.zoo import DOUBLE
from torch import nn

from opacus_shuffle.permutation import find_permutations
from opacus_shuffle.permutation.finding import rules


@torch.library.custom_op("opacus_shuffle_tests::leaky_running_sum", mutates_args=())
def leaky_running_sum(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(-1)


SPARSE_PRODUCTS = [
    torch.mm,
    torch.sparse.mm,
    lambda one, other: torch.sparse.addmm(other, one, other),
]


def sparse_product(product, transposed, h):
    """Mixes four records, or all units, by a sparse matrix."""
    operand = h.T if transposed else h[:4]
    graph = torch.eye(len(operand), dtype=torch.float64).roll(1, 0).to_sparse()
    return product(graph, operand).T if transposed else product(graph, operand)


HIDDEN, NEXT = 6, 7
FREE, STAYS = by_hand.symmetric(HIDDEN) + by_hand.symmetric(NEXT), by_hand.symmetric(NEXT)
"""Sizes of the group if six units move between two layers, and if they stay."""


def into(h: torch.Tensor, columns: int) -> torch.Tensor:
    """The units added up in so many columns, by their positions."""
    return h.new_zeros(len(h), columns).scatter_add(
        1, (torch.arange(HIDDEN) % columns).expand_as(h), h
    )


def largest_of_a_given_tensor(h: torch.Tensor) -> torch.Tensor:
    out = (h.new_zeros(len(h), 3), torch.zeros(len(h), 3).long())
    return torch.topk(h, 3, out=out)[0]


BETWEEN: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float]] = {
    # No rule
    "custom operator": (lambda h: leaky_running_sum(h), STAYS),
    "fourier transform": (lambda h: torch.fft.rfft(h).real, STAYS),
    "unfold": (lambda h: h.unfold(1, 3, 1).flatten(1), STAYS),
    "filled through a view": (
        lambda h: h.clone().index_fill_(1, torch.tensor([0]), 0.0),
        STAYS,
    ),
    "memory with other strides": (
        lambda h: torch.as_strided(h.contiguous(), (len(h), 3), (6, 2)),
        STAYS,
    ),
    "gather": (lambda h: h.gather(1, torch.tensor([[0, 3, 2]]).expand(len(h), -1)), STAYS),
    "pixel shuffle": (
        lambda h: F.pixel_shuffle(h.repeat(1, 2)[..., None, None], 2).flatten(1),
        STAYS,
    ),
    "rows put into zeros": (
        lambda h: h.new_zeros(len(h), HIDDEN).index_put((torch.arange(2),), h[:2]),
        STAYS,
    ),
    "sums into two": (lambda h: into(h, 2), STAYS),
    "sums into six": (lambda h: into(h, 6), STAYS),
    # Positions
    "running sum": (lambda h: h.cumsum(-1), STAYS),
    "running maximum": (lambda h: h.cummax(-1).values, STAYS),
    "flip": (lambda h: h + h.flip(-1), STAYS),
    "every fourth": (lambda h: h[:, ::4], STAYS),
    "constant factors": (lambda h: h * torch.arange(6, dtype=h.dtype), STAYS),
    "convolution over units": (
        lambda h: torch.conv1d(h.unsqueeze(1), torch.ones(1, 1, 3).to(h)).flatten(1),
        STAYS,
    ),
    "one hot": (lambda h: F.one_hot(h.argmax(-1), HIDDEN).to(h) * h, STAYS),
    # Ranks
    "sort": (lambda h: h.sort(-1).values, STAYS),
    "sort and positions": (lambda h: torch.add(*h.sort(-1)), STAYS),
    "units in their own order": (lambda h: h.take_along_dim(h.argsort(1), 1), STAYS),
    "topk": (lambda h: h.topk(3).values, STAYS),
    "topk of a given tensor": (largest_of_a_given_tensor, STAYS),
    "maximum": (lambda h: h.max(-1, keepdim=True).values, STAYS),
    "maximum and position": (lambda h: torch.add(*h.max(-1, keepdim=True)), STAYS),
    "median": (lambda h: h.median(-1, keepdim=True).values, STAYS),
    "mode": (lambda h: h.round().mode(-1, keepdim=True).values, STAYS),
    "kthvalue": (lambda h: h.kthvalue(2, keepdim=True).values, STAYS),
    "quantile": (lambda h: h.quantile(0.3, dim=-1, keepdim=True), STAYS),
    "maximum without a position": (lambda h: h.amax(-1, keepdim=True), FREE),
    "maximum of all": (lambda h: h - h.max(), FREE),
    "sorted records": (lambda h: torch.add(*h.sort(0)), FREE),
    "maximum of records": (lambda h: h - h.max(0).values, FREE),
    # Along other axes
    "masked in place": (
        lambda h: h.clone().masked_fill_(h > 0, torch.tensor(0.5).double()),
        FREE,
    ),
    "gates between": (
        lambda h: h[:, ::2].sigmoid() * h[:, 1::2],
        by_hand.symmetric(3) + STAYS,
    ),
    **{
        f"sparse {number}, {'units' if transposed else 'records'}": (
            functools.partial(sparse_product, product, transposed),
            STAYS if transposed else FREE,
        )
        for number, product in enumerate(SPARSE_PRODUCTS)
        for transposed in (False, True)
    },
}


@torch.no_grad()
@pytest.mark.parametrize("name", BETWEEN)
def test_units_between_two_layers_move_where_the_operation_allows_it(name):
    function, bits = BETWEEN[name]
    torch.manual_seed(0)
    front = nn.Sequential(nn.Linear(5, HIDDEN), nn.Tanh(), Apply(function)).double()
    inputs, others = (torch.randn(n, 5, dtype=torch.float64) for n in (4, 6))
    back = nn.Sequential(nn.Linear(front(inputs).shape[-1], NEXT), nn.Tanh(), nn.Linear(NEXT, 3))
    network = nn.Sequential(front, back.double())
    spec = find_permutations(network, inputs)
    assert spec.log2_size() == pytest.approx(bits)
    moved = copy.deepcopy(network)
    spec.apply_(moved, spec.sample(torch.Generator().manual_seed(1)))
    torch.testing.assert_close(moved(others), network(others), rtol=DOUBLE, atol=DOUBLE)


@pytest.mark.zoo
def test_experts_in_one_parameter_stay_and_attention_moves():
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=40, hidden_size=32, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=16, head_dim=8,
    )  # fmt: skip
    network = transformers.MixtralForCausalLM(config)
    spec = find_permutations(network, torch.randint(3, 40, (2, 6)))
    assert "model.layers.0.mlp.experts.down_proj" in spec.unmoved
    assert spec.moved_fraction("model.layers.0.self_attn.v_proj.weight") == 1


def test_attention_inside_of_pytorchs_own_encoder_is_seen_into():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    spec = find_permutations(
        nn.Sequential(nn.Linear(4, 8), encoder, nn.Linear(8, 3)), torch.randn(2, 5, 4)
    )
    # In each layer: units, heads, and in each head queries with keys, and values. In all: the
    # residual stream.
    layer = by_hand.symmetric(16) + by_hand.symmetric(2) + 2 * 2 * by_hand.symmetric(4)
    assert spec.log2_size() == pytest.approx(by_hand.symmetric(8) + 2 * layer)
    assert not spec.unknown


def text_cnn():
    """Kim's network for sentences: kernels over some words, each as wide as an embedding."""

    def way(net, x):
        h = net.words(x)[:, None]
        return net.out(torch.cat([k(h).relu().squeeze(3).amax(2) for k in net.kernels], 1))

    kernels = nn.ModuleList(nn.Conv2d(1, 4, (count, 6)) for count in (2, 3))
    return Wired(way, words=nn.Embedding(20, 6), kernels=kernels, out=nn.Linear(8, 2))


def mixer():
    """Mixes five tokens by convolutions over them, and then their features."""

    def way(net, x):
        h = net.enter(x)
        return net.leave((h + net.tokens(net.norm(h))).mean(1))

    tokens = nn.Sequential(nn.Conv1d(5, 7, 1), nn.GELU(), nn.Conv1d(7, 5, 1))
    ends = {"enter": nn.Linear(3, 6), "leave": nn.Linear(6, 2)}
    return Wired(way, **ends, norm=nn.LayerNorm(6), tokens=tokens)


@pytest.mark.parametrize(
    ("network", "sample", "sizes"),
    [(text_cnn, torch.arange(18).view(2, 9), (6, 4, 4)), (mixer, torch.randn(2, 5, 3), (6, 7))],
    ids=["a kernel that spans an axis", "a kernel of one tap"],
)
def test_a_convolution_that_is_a_matrix_product_moves_as_one(network, sample, sizes):
    torch.manual_seed(0)
    spec = find_permutations(network(), sample)
    assert spec.log2_size() == pytest.approx(sum(map(by_hand.symmetric, sizes)))


def test_a_kernel_that_spans_an_axis_of_the_sample_alone_stays():
    def way(net, x):
        weights = torch.cat([net.weights, net.weights], 2)[..., : x.shape[1]]
        return net.kernel(x[:, None] * weights).amax(2)

    network = Wired(way, weights=torch.randn(1, 4, 5), kernel=nn.Conv1d(4, 2, 5))
    spec = find_permutations(network, torch.randn(2, 5))
    assert spec.log2_size() == pytest.approx(by_hand.symmetric(4))


@pytest.mark.parametrize(
    ("one", "other", "groups", "size"),
    [
        (4, 4, 2, 24 * 24),  # each is a group
        (2, 6, 1, 2 * 720),  # both lie in one group
        (4, 8, 3, 24 * 2 * 24**2),  # one group, and two that change places
        (3, 5, 2, 6),  # the second begins inside of a group and ends behind it: it stays
    ],
)
def test_groups_of_a_norm_may_cut_a_concatenation(one, other, groups, size):
    def way(net, x):
        return net.out(net.norm(torch.cat([net.one(x), net.other(x)], -1)))

    layers = {"one": nn.Linear(5, one), "other": nn.Linear(5, other)}
    layers |= {"norm": nn.GroupNorm(groups, one + other), "out": nn.Linear(one + other, 2)}
    assert (
        round(2 ** find_permutations(Wired(way, **layers), torch.randn(3, 5)).log2_size()) == size
    )


MATRIX, CUBE = (3, 4), (2, 3, 4)
CASES: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "where": (lambda x, y, z: torch.where(x > 0, y, z), (CUBE, (4,), (3, 1))),
    "masked in place": (
        lambda x, y: x.clone().masked_fill_(y > 0, torch.tensor(2.0)),
        (CUBE, (3, 1)),
    ),
    "largest and where": (lambda x: tuple(x.max(1)), (CUBE,)),
    "largest": (lambda x: x.max(1, keepdim=True).values, (CUBE,)),
    "median": (lambda x: x.median(1).values, (CUBE,)),
    "median of numbers": (lambda x: x.nanmedian(1).values, (CUBE,)),
    "most frequent": (lambda x: x.mode(1).values, (CUBE,)),
    "kth": (lambda x: x.kthvalue(2, 1).values, (CUBE,)),
    "sorted": (lambda x: x.sort(1).values, (CUBE,)),
    "sorted and where": (lambda x: tuple(x.sort(1)), (CUBE,)),
    "sorted heads": (lambda x: x.view(3, 2, 2).sort(1).values, (MATRIX,)),
    "sorted together": (lambda x, y: torch.cat([x, y], 1).sort(1).values, (MATRIX, (3, 2))),
    "sorted stack": (lambda x, y: torch.stack([x, y]).sort(0).values, (MATRIX, MATRIX)),
    "ranks": (lambda x: x.argsort(1).argsort(1), (MATRIX,)),
    "topk": (lambda x: x.topk(2, 1).values, (CUBE,)),
    "topk in any order": (lambda x: x.topk(2, 1, sorted=False).values, (CUBE,)),
    "the largest of each": (
        lambda x: torch.where(x < x.kthvalue(3, 1, keepdim=True).values, 0.0, x),
        (MATRIX,),
    ),
    "running largest": (lambda x: tuple(x.cummax(1)), (CUBE,)),
    "running sum": (lambda x: x.cumsum(1), (CUBE,)),
    "sparse": (
        lambda x: torch.sparse.mm(torch.eye(3).double().roll(1, 0).to_sparse(), x),
        (MATRIX,),
    ),
    "padded volume": (lambda x: F.pad(x, (1, 1, 1, 1, 1, 1), mode="reflect"), ((2, 3, 2, 3, 4),)),
    "replicated volume": (
        lambda x: F.pad(x, (1, 1, 1, 1, 1, 1), mode="replicate"),
        ((2, 3, 2, 3, 4),),
    ),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact"), (CUBE,)),
    "every other": (lambda x: x[:, ::2], (MATRIX,)),
    "every other one and the ones between": (lambda x: x[:, ::2] * x[:, 1::2], (MATRIX,)),
    "every other one written to": (
        lambda x, y: torch.cat([1 * x, y])[:, 1::2].mul_(2),
        (MATRIX, MATRIX),
    ),
    "every other of an odd number": (lambda x: x[:, 1::2], (CUBE,)),
}


@pytest.mark.parametrize("name", CASES)
def test_permuted_operands_give_permuted_results(name):
    torch.manual_seed(0)
    operation = Operation(*CASES[name])
    spec = labelled(operation)
    assert spec.blocks
    assert not breaks(operation, spec)


@pytest.mark.parametrize("name", ["running sum", "running largest", "sorted and where"])
def test_a_rule_that_does_not_hold_is_seen(name, monkeypatch):
    def keeps_axes(run, call):
        for result in call.outputs:
            run.set(result, run.axes(call.inputs[0]))

    for operation in ("cumsum", "cummax", "sort"):
        monkeypatch.setitem(rules.RULES, f"aten.{operation}", keeps_axes)
    operation = Operation(*CASES[name])
    assert breaks(operation, labelled(operation))
