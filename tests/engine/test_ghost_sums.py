"""Sums of bits with ghost clipping: layer by layer, each record's clipped gradient on the grid.

A protocol without its noise shows what was added up. Every rounding is off by less than a step, so
a sum of n reports lies within n steps of the sum of the clipped gradients, whatever is drawn.
"""

from __future__ import annotations

import copy
import gc
import itertools
import math

import pytest
import torch
from helpers.private_runs import Run
from opacus.layers import DPLSTM
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle import PrivacyEngine
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
USERS, BATCH = 21, 7


class Noiseless(ShuffleVectorSum):
    """Adds up the users' rounded vectors alone; private it is not."""

    def encode_scaled(self, pieces, factors, generator=None):
        self.scales = [*getattr(self, "scales", []), factors]
        return super().encode_scaled(pieces, factors, generator)

    def draw_noise(self, num_reports, generator=None, *, part=False):
        return torch.zeros(self.dimension, dtype=torch.int64)

    def decode(self, counts, num_reports):
        expected = num_reports * self.noise_bits * self.bit_probability * self.grid_step
        return super().decode(counts, num_reports) + expected


class Products(nn.Module):
    """A record's loss is the product of its output and its target."""

    reduction = "sum"

    def forward(self, outputs, targets):
        losses = (outputs.flatten(1) * targets).sum(1)
        return losses if self.reduction == "none" else losses.sum()


def run_of(module, x, y, *, mode="ghost", batch=BATCH, epsilon=300.0, protocol=None, **options):
    """A run that learns nothing, by default on a grid that is finer than single precision."""
    dimension = sum(parameter.numel() for parameter in module.parameters())
    users = batch if options.get("poisson_sampling") is False else len(x)
    toy = {
        "module": module,
        "optimizer": torch.optim.SGD(module.parameters(), lr=0.0),
        "data_loader": DataLoader(TensorDataset(x, y), batch_size=batch),
    }
    if protocol is None:
        protocol = Noiseless(users, dimension, 1.0, epsilon=epsilon, delta=1e-5)
    run = Run(
        "shuffled_sums",
        mode,
        sigma=None,
        engine=PrivacyEngine(accountant="shuffled_sums", seed=0),
        toy={**toy, "max_grad_norm": protocol.max_norm},
        aggregator=protocol,
        loss_reduction="sum",
        criterion=Products(),
        **options,
    )
    if mode != "ghost":
        run.criterion = Products()
    return run


def releases(run, physical=BATCH):
    """The records of an epoch's batches, and what was released of them."""
    with run.split(physical) as batches:
        records, before = [], run.updates
        for x, y in batches:
            records.append((x, y))
            run.step((x, y))
            if run.updates > before:
                released = [parameter.grad.flatten() for parameter in run.optimizer.params]
                yield [torch.cat(part) for part in zip(*records, strict=True)], torch.cat(released)
                records, before = [], run.updates


def gradients(network, x, y):
    """Each record's gradient by autograd alone, in double precision, shape [records, entries]."""
    rows, double = [], y.double()
    for place in range(len(x)):
        one = slice(place, place + 1)
        loss = Products()(network(x[one]), double[one])
        parts = torch.autograd.grad(loss, list(network.parameters()), materialize_grads=True)
        rows.append(torch.cat([part.flatten() for part in parts]))
    entries = sum(parameter.numel() for parameter in network.parameters())
    return torch.stack(rows) if rows else torch.zeros(0, entries, dtype=torch.float64)


class Doubled(nn.Module):
    """Takes its input to the precision of its weights, and uses its layer twice if asked."""

    def __init__(self, *layers, twice=False):
        super().__init__()
        self.layers, self.twice = nn.Sequential(*layers), twice

    def forward(self, x):
        dtype = next(self.parameters()).dtype
        x = x.to(dtype) if x.is_floating_point() else x
        return torch.tanh(self.layers(self.layers(x) if self.twice else x))


class Recurrent(Doubled):
    def __init__(self):
        super().__init__(DPLSTM(3, 4, batch_first=True))

    def forward(self, x):
        return self.layers[0](x.to(next(self.parameters()).dtype))[0]


class Adapted(Doubled):
    """Has a parameter of its own, whose gradients are computed by functorch on a copy."""

    def __init__(self):
        super().__init__(nn.Linear(5, 3))
        self.low = nn.Parameter(torch.randn(5, 3))

    def forward(self, x):
        return super().forward(x) + x.to(self.low.dtype) @ self.low


NETWORKS = {
    "layers": (lambda: Doubled(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), (5,), 3),
    "rows": (lambda: Doubled(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 2)), (6, 5), 12),
    "text": (lambda: Doubled(nn.Embedding(9, 4), nn.Linear(4, 2)), None, 12),
    "a convolution that is used twice": (
        lambda: Doubled(nn.Conv2d(2, 2, 3, padding=1), nn.GroupNorm(1, 2), twice=True),
        (2, 5, 5),
        50,
    ),
    "a recurrent layer": (Recurrent, (5, 3), 20),
    "a parameter beside its layers": (Adapted, (5,), 3),
}


@pytest.mark.parametrize(
    ("options", "physical"),
    [({}, BATCH), ({}, 3), ({"poisson_sampling": False, "epsilon": 60.0}, 3)],
)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_release_is_the_sum_of_the_clipped_gradients_of_the_records(name, options, physical):
    """Of every entry: no layer is left unclipped, left out, counted twice or in another's place."""
    make, shape, outputs = NETWORKS[name]
    torch.manual_seed(1)
    x = torch.randint(9, (USERS, 6)) if shape is None else torch.randn(USERS, *shape)
    y = torch.logspace(-3, 3, USERS)[:, None] * torch.randn(USERS, outputs)
    module = make()
    plain = copy.deepcopy(module).double()
    run = run_of(module, x, y, **options)
    protocol = run.optimizer.aggregator
    lengths = gradients(plain, x, y).norm(dim=1)
    assert float(lengths.min()) < 0.2 < 10 < float(lengths.max())  # some are clipped, some are not
    for records, released in releases(run, physical):
        raw = gradients(plain, *records)
        norms = raw.norm(dim=1, keepdim=True)
        expected = (raw / norms.clamp(min=1)).sum(0)
        tolerance = protocol.num_users * protocol.grid_step + 2e-4 * len(norms)
        assert float((released - expected).abs().max()) <= tolerance
        assert float((expected.abs() > 4 * tolerance).double().mean()) > 0.1  # it can be told


@pytest.mark.parametrize("network", ["layers", "text", "a recurrent layer"])
def test_a_batch_of_no_records_is_a_round_in_which_all_report_zero(network):
    make, shape, outputs = NETWORKS[network]
    x = torch.randint(9, (USERS, 6)) if shape is None else torch.randn(USERS, *shape)
    run = run_of(make(), x, torch.ones(USERS, outputs), batch=1)
    protocol = run.optimizer.aggregator
    empty = [released for records, released in releases(run) if not len(records[0])]
    assert len(empty) > 3
    assert run.accounted == run.updates == USERS
    assert float(torch.stack(empty).abs().max()) <= USERS * protocol.grid_step


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("double", [False, True])
def test_gradients_on_the_grid_are_counted_exactly(mode, double):
    """Whole numbers, on a grid of steps of one: nothing is left to be rounded."""
    numbers = torch.Generator().manual_seed(2)
    x, y = (
        torch.randint(-2, 3, (BATCH, size), generator=numbers).to(
            torch.float64 if double else torch.float32
        )
        for size in (5, 3)
    )
    module = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).to(x.dtype)
    for parameter in module.parameters():
        parameter.data = torch.randint(-1, 2, parameter.shape, generator=numbers).to(x.dtype)
    plain, entries = copy.deepcopy(module).double(), 5 * 4 + 4 + 4 * 3 + 3
    steps = Noiseless(BATCH, entries, 1.0, epsilon=30.0, delta=1e-5).granularity
    assert steps % 2 == 0  # zero is on the grid
    protocol = Noiseless(BATCH, entries, steps / 2, epsilon=30.0, delta=1e-5)
    assert protocol.grid_step == 1.0
    raw = gradients(plain, x.double(), y)
    assert 0 < float(raw.norm(dim=1).max()) < protocol.max_norm
    run = run_of(module, x, y, mode=mode, protocol=protocol, poisson_sampling=False)
    ((_, released),) = releases(run)
    torch.testing.assert_close(released.double(), raw.sum(0), rtol=0, atol=1e-6)
    # Rounding of norms shortens none; of a gradient that is zero the factor may be so, too.
    assert set(torch.cat(protocol.scales).tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("growth", [1000.0, math.inf, math.nan])
def test_no_report_is_longer_than_the_norm_whatever_the_first_pass_has_found(growth):
    """As with an operation that answers otherwise each time: here the second pass's gradients of
    the first layer are a thousand times the first's, or no numbers, and are left out then."""
    torch.manual_seed(3)
    x, y = torch.randn(1, 5).expand(BATCH, 5), torch.randn(1, 3).expand(BATCH, 3)
    run = run_of(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), x, y, poisson_sampling=False)
    run.step()
    calls = []

    def grow(gradient):
        calls.append(1)
        return gradient * (growth if len(calls) == 2 else 1)

    run.network[1].register_forward_pre_hook(lambda _, args: args[0].register_hook(grow) and None)
    ((_, released),) = releases(run)
    assert len(calls) == 2
    protocol = run.optimizer.aggregator
    rounded = BATCH * protocol.grid_step * protocol.dimension**0.5
    first, second = (float(part.norm()) for part in released.split([5 * 4 + 4, 4 * 3 + 3]))
    assert 0.5 * BATCH < second <= math.hypot(first, second) <= BATCH + rounded
    assert (first > 0.1 * BATCH) == math.isfinite(growth)
    assert first > 0.1 * BATCH or first <= rounded


@pytest.mark.parametrize("half", ["bfloat16", "autocast"])
def test_no_report_is_longer_than_the_norm_in_half_precision(half):
    """All records are the same one, so the sum is as long as the reports are together."""
    torch.manual_seed(4)
    x, y = torch.randn(1, 5).expand(BATCH, 5), 10 * torch.randn(1, 3).expand(BATCH, 3)
    dtype = torch.bfloat16 if half == "bfloat16" else torch.float32
    module = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 3)).to(dtype)
    run = run_of(module, x.to(dtype), y, poisson_sampling=False)
    x, y = run.batch()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half == "autocast"):
        loss = run.criterion(run.model(x), y)
    loss.backward()
    run.optimizer.step()
    released = torch.cat([parameter.grad.flatten() for parameter in run.optimizer.params])
    protocol = run.optimizer.aggregator
    rounded = BATCH * protocol.grid_step * protocol.dimension**0.5
    assert released.dtype == dtype
    # .grad itself is rounded to eight bits.
    assert 0.98 * BATCH < float(released.double().norm()) <= BATCH * (1 + 2**-8) + rounded


class Watched(Noiseless):
    """Counts the entries of gradients of records that are alive whenever some are counted."""

    def encode_scaled(self, pieces, factors, generator=None):
        memory = {
            tensor.untyped_storage().data_ptr(): tensor.numel()
            for tensor in gc.get_objects()
            if type(tensor) is torch.Tensor
            and tensor.dim() > 1
            and (len(tensor), tensor.numel() // len(tensor)) in self.shapes
        }
        self.alive = [*getattr(self, "alive", []), sum(memory.values())]
        return super().encode_scaled(pieces, factors, generator)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_the_gradients_of_one_layer_alone_are_held_at_a_time(mode):
    sizes = [17, 19, 23, 29, 31]
    layers = [nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
    module = nn.Sequential(*layers)
    weights = [layer.weight.numel() for layer in layers]
    entries = sum(parameter.numel() for parameter in module.parameters())
    protocol = Watched(BATCH, entries, 1.0, epsilon=1.0, delta=1e-5)
    protocol.shapes = {(BATCH, weight) for weight in weights}
    gc.collect()  # other runs' gradients
    x, y = torch.randn(BATCH, sizes[0]), torch.randn(BATCH, sizes[-1])
    run = run_of(module, x, y, mode=mode, protocol=protocol, poisson_sampling=False)
    run.backward()
    assert mode == "hooks" or all(parameter.grad is None for parameter in run.optimizer.params)
    run.optimizer.step()
    assert max(protocol.alive) == BATCH * (max(weights) if mode == "ghost" else sum(weights))
    assert len(protocol.alive) == (8 if mode == "ghost" else 1)


def test_layers_that_share_a_weight_are_refused():
    """Their gradients would have to be added up before they are rounded."""
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    module[2].weight = module[0].weight
    with pytest.raises(ValueError, match=r"tied parameters, 0\.weight = 2\.weight"):
        run_of(module, torch.zeros(BATCH, 4), torch.zeros(BATCH, 4), poisson_sampling=False)
