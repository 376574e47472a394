"""What is followed is never less than what a change of a record changes, and for plain layers no more."""

from __future__ import annotations

import functools
import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from opacus_shuffle.engine.record_flow import RecordFlow, UnfollowedError

RECORDS = 3


def followed(function, x):
    flow = RecordFlow(RECORDS)
    flow.mark(x, axis=0)
    with flow:
        result = function(x)
    return flow, result


def changes(function, x):
    """Which entries of the result change with which record, as bits."""
    start = function(x.clone())
    bits = torch.zeros(start.shape, dtype=torch.uint8)
    for record in range(RECORDS):
        for seed in range(3):
            changed = x.clone()
            changed[record] = torch.randn(x[record].shape, generator=torch.Generator().manual_seed(seed)).to(x) * 3
            different = function(changed)
            assert different.shape == start.shape
            moved = ~torch.isclose(different.float(), start.float(), rtol=1e-6, atol=1e-6, equal_nan=True)
            bits |= moved.to(torch.uint8) << record
    return bits


def written(x, *steps):
    result = x.clone()
    for step in steps:
        step(result)
    return result


def in_place_through_a_view(x):
    result = x.clone()
    result.view(3, 4, 2, 2)[1].transpose(0, 1).add_(x[2, 0, 0])
    return result


def gradient(function):
    def of(x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad((function(x) ** 2).sum(), x)[0]

    return of


torch.manual_seed(0)
WEIGHT, SQUARE, IMAGES = torch.randn(5, 4), torch.randn(4, 4), torch.randn(6, 4, 2, 2)
OPERATIONS = {
    "a sum with its mean": lambda x: x - x.mean(0),
    "layer norm": lambda x: F.layer_norm(x, (4, 4)),
    "group norm": lambda x: F.group_norm(x, 2),
    "linear": lambda x: F.linear(x, WEIGHT, torch.ones(5)),
    "convolution": lambda x: F.conv1d(x, torch.randn(4, 4, 2, generator=torch.Generator().manual_seed(0))),
    "convolution over the batch": lambda x: F.conv1d(x.permute(1, 0, 2).contiguous(), torch.ones(2, 3, 1)),
    "weights that come of records": lambda x: F.conv1d(torch.ones(3, 4, 5), x),
    "products over records": lambda x: x.flatten(1).T @ x.flatten(1),
    "products": lambda x: x @ x.transpose(1, 2),
    "a product with itself": lambda x: torch.addmm(x[0], x[1], SQUARE),
    "softmax": lambda x: x.softmax(-1),
    "softmax over records": lambda x: x.softmax(0),
    "attention": lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]),
    "attention with a mask of records": lambda x: F.scaled_dot_product_attention(
        x[:, None], x[:, None], x[:, None], (x[:, :1] * x[:, :, :1])[:, None]
    ),
    "sorting records": lambda x: x.sort(0).values,
    "sorting within records": lambda x: x.sort(1).values,
    "the largest": lambda x: x.topk(2, dim=1).values,
    "maxima": lambda x: x.max(1).values,
    "one maximum": lambda x: x / x.abs().max(),
    "maxima of two": lambda x: torch.maximum(x, x.flip(0)),
    "turned": lambda x: x.flip(0),
    "rolled": lambda x: x.roll(1, 0),
    "cat": lambda x: torch.cat([x[1:], torch.zeros(1, 4, 4)]),
    "padded": lambda x: F.pad(x, (1, 2), value=-3.0),
    "padded over records": lambda x: F.pad(x, (0, 0, 0, 0, 1, 0)),
    "chosen by constants": lambda x: x[torch.tensor([2, 2, 0])],
    "chosen by records": lambda x: x[torch.arange(3), x[:, 0].argmax(1)],
    "chosen among records": lambda x: x[x[:, 0, 0].argsort()],
    "chosen along two axes": lambda x: x[torch.arange(3), :, x[:, 0].argmax(1)],
    "gathered": lambda x: x.gather(1, x.argsort(2)),
    "gathered among records": lambda x: x.gather(0, (x > 0).long()),
    "looked up": lambda x: F.embedding((x > 0).long(), WEIGHT),
    "a table of records": lambda x: F.embedding(torch.tensor([[0, 1], [2, 3]]), x[:, 0].T),
    "cumulative": lambda x: x.cumsum(0),
    "where": lambda x: torch.where(x[:1] > 0, x, -x),
    "scattered": lambda x: torch.zeros(4, 4).index_add(0, torch.tensor([0, 0, 1]), x[:, 0]),
    "pooled": lambda x: F.max_pool2d(x[:, None], 2),
    "pooled by averages": lambda x: F.adaptive_avg_pool2d(x[:, None], 1),
    "larger": lambda x: F.interpolate(x[:, None], scale_factor=2, mode="bilinear"),
    "tables of distances": lambda x: torch.cdist(x, x),
    "an unknown operation": lambda x: torch.linalg.inv(x + 9 * torch.eye(4)),
    "written": lambda x: written(x, lambda y: y[0].copy_(x[1]), lambda y: y[2].zero_(), lambda y: y[:, 1].mul_(y[2, 1])),
    "overwritten": lambda x: written(x, lambda y: y.fill_(1.0), lambda y: y[1].add_(x[1])),
    "written through a view": in_place_through_a_view,
    "gradients of a norm": gradient(lambda x: F.layer_norm(x, (4,))),
    "gradients of group norm": gradient(lambda x: F.group_norm(x, 2)),
    "gradients of softmax": gradient(lambda x: x.softmax(0)),
    "gradients of a convolution": gradient(lambda x: F.conv1d(x, SQUARE[..., None])),
    "gradients of attention": gradient(lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])),
    "gradients of pooling": gradient(lambda x: F.max_pool2d(x[:, None], 2)),
    "gradients of a lookup": gradient(lambda x: x[torch.tensor([2, 2, 0])]),
    "statistics": lambda x: x.var((0, 2)),
    "an entire norm": lambda x: x.norm(),
    "norms": lambda x: x.norm(dim=1, keepdim=True),
    "expanded": lambda x: x[:1].expand(3, 4, 4) + 1,
    "stacked": lambda x: torch.stack(list(x)[::-1], 1),
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x),
    "einsum over records": lambda x: torch.einsum("bij,cij->bc", x, x),
    "repeated": lambda x: x.repeat(2, 1, 1),
    "triangles": lambda x: x.permute(1, 0, 2).tril(),
    "gated": lambda x: F.glu(x, 1),
    "leaky": gradient(lambda x: F.leaky_relu(F.elu(F.hardswish(F.prelu(x, torch.ones(4) / 3))))),
    "gradients of gates": gradient(lambda x: F.glu(x, 1)),
    "gradients of entries that records choose": gradient(lambda x: x[torch.arange(3), x[:, 0].argmax(1)]),
    "gradients of records that records choose": gradient(lambda x: x[x[:, 0, 0].argsort()]),
    "put by records": lambda x: torch.zeros(3, 4, 4).index_put((torch.arange(3), x[:, 0].argmax(1)), x[:, 1]),
    "put all along": lambda x: torch.zeros(4, 3, 4).index_put((x[:, 0].argmax(1), torch.tensor([0, 0, 2])), x[:, 1]),
    "put by a constant mask": lambda x: torch.zeros(3, 4, 4).index_put((torch.tensor([True, False, True]),), x[1:]),
    "gradients of maxima": gradient(lambda x: x.max(1).values),
    "gradients of the largest": gradient(lambda x: x.topk(2, dim=1).values),
    "scattered by records": lambda x: torch.zeros(3, 4, 4).scatter_add(1, x.argsort(1), x),
    "scattered among records": lambda x: torch.zeros(3, 4, 4).scatter(0, x.argsort(0), x),
    "scattered in part": lambda x: x.scatter(1, torch.tensor([[[1, 2]]]), x.flip(0)),
    "windows": gradient(lambda x: x.unfold(1, 2, 1)),
    "windows of records": gradient(lambda x: x.unfold(0, 2, 1)),
    "instance norm": lambda x: F.instance_norm(x),
    "gradients of instance norm": gradient(lambda x: F.instance_norm(x, weight=torch.ones(4), bias=torch.ones(4))),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "batch norm as it was": lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4)),
    "group norm over records": lambda x: torch.native_group_norm(x, None, None, 1, 12, 4, 1, 1e-5)[0],
    "gradients of what is larger": gradient(lambda x: F.interpolate(x, scale_factor=2, mode="linear")),
    "gradients of padding": gradient(lambda x: F.pad(x, (1, 1), mode="reflect")),
    "patches": gradient(lambda x: F.unfold(x[:, None], 2)),
}
IN_ROWS = (
    *("layer norm", "group norm", "linear", "convolution", "products", "softmax", "attention", "sorting within records"),
    *("the largest", "maxima", "chosen by records", "chosen along two axes", "gathered", "looked up", "pooled", "larger"),
    *("pooled by averages", "padded", "norms", "einsum", "gradients of a norm", "gradients of group norm"),
    *("gradients of a convolution", "gradients of attention", "gradients of pooling", "attention with a mask of records"),
    *("gated", "leaky", "gradients of gates", "gradients of entries that records choose", "put by records", "windows"),
    *("gradients of maxima", "gradients of the largest", "scattered by records", "instance norm", "gradients of instance norm"),
    *("batch norm as it was", "gradients of what is larger", "gradients of padding", "patches"),
)


@pytest.mark.parametrize("name", OPERATIONS)
@settings(deadline=None, max_examples=5)  # nearly every change of a number changes what depends on it
@given(seed=st.integers(0, 2**31))
def test_no_entry_that_a_record_changes_misses_its_bit(name, seed):
    x = torch.randn(RECORDS, 4, 4, generator=torch.Generator().manual_seed(seed))
    flow, result = followed(OPERATIONS[name], x)
    missed = changes(OPERATIONS[name], x) & ~flow.origins(result)
    assert not missed.any()


@pytest.mark.parametrize("name", IN_ROWS)
def test_operations_within_records_are_known_to_be_that(name):
    flow, result = followed(OPERATIONS[name], torch.randn(RECORDS, 4, 4))
    assert flow.rows(result, 0) == [1, 2, 4]


def test_what_no_record_reaches_has_no_bits():
    x = torch.randn(RECORDS, 4, 4)
    flow, result = followed(lambda x: torch.zeros_like(x) + torch.ones(4), x)
    assert not flow.origins(result).any()


def test_memory_that_is_freed_and_used_anew_comes_from_no_record():
    def fill(x):
        for _ in range(2000):
            x + 1  # freed at once
        return torch.zeros(RECORDS, 4, 4) + 1

    flow, result = followed(fill, torch.randn(RECORDS, 4, 4))
    assert not flow.origins(result).any()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * x.max().item(),
        lambda x: x[x > 0].sum(),
        lambda x: x[: int((x[:, 0, 0] > 0).sum())],
        lambda x: x.nonzero(),
        lambda x: torch.view_as_real(torch.complex(x, x)) + 1,
        lambda x: (x.to_sparse() * 2).to_dense(),
        lambda x: x.unique(),
        lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4), training=True),
        lambda x: x[(x[:, 0, 0] > -99).to(torch.uint8)],
        lambda x: torch._pack_padded_sequence(x, (x[:, 0, 0] > -99).long() * 4, True)[0],
    ],
)
def test_values_that_cannot_be_followed_end_the_run(function):
    with pytest.raises(UnfollowedError):
        followed(function, torch.randn(RECORDS, 4, 4))


@pytest.mark.parametrize("records", [0, 9])
def test_more_records_than_a_byte_has_bits_are_refused(records):
    with pytest.raises(ValueError, match=rf"records must be 1 to 8, .* got {records}"):
        RecordFlow(records)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2), st.integers(1, 8))
def test_the_bits_of_a_row_are_those_of_all_its_entries(seed, axis, records):
    generator = torch.Generator().manual_seed(seed)
    shape = torch.randint(0, 6, (3,), generator=generator).tolist()
    tensor, flow = torch.zeros(shape), RecordFlow(records)
    bits = torch.randint(0, 2**records, shape, generator=generator).to(torch.uint8)
    if tensor.numel():
        flow._keep(tensor, bits)
    slowly = [functools.reduce(operator.or_, row.flatten().tolist(), 0) for row in bits.movedim(axis, 0)]
    assert flow.rows(tensor, axis) == slowly
