"""Sums of bits with ghost clipping: the sum of the records' clipped gradients, on the grid.

A protocol without its noise shows what was added up. The rounding is off by less than a step.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from helpers import toy as small_runs
from helpers.private_runs import Run
from opacus.layers import DPLSTM
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle import PrivacyEngine
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
USERS, BATCH = 21, 7
SAMPLES = {"poisson_sampling": False}


class Noiseless(ShuffleVectorSum):
    """Releases the rounded sum alone; private it is not."""

    def draw_noise(self, num_reports, generator=None):
        expected = num_reports * self.noise_bits * self.bit_probability
        return torch.full((self.dimension,), expected, dtype=torch.float64, device=generator.device)


class Products(nn.Module):
    """A record's loss is the product of its output and its target."""

    reduction = "sum"

    def forward(self, outputs, targets):
        losses = (outputs.flatten(1) * targets).sum(1)
        return losses if self.reduction == "none" else losses.sum()


def run_of(module, x, y, *, mode="ghost", batch=BATCH, epsilon=300.0, norm=1.0, **options):
    """A run that learns nothing, by default on a grid that is finer than single precision."""
    users = batch if options == SAMPLES else len(x)
    dimension = sum(parameter.numel() for parameter in module.parameters())
    toy = {
        "module": module,
        "optimizer": torch.optim.SGD(module.parameters(), lr=0.0),
        "data_loader": DataLoader(TensorDataset(x, y), batch_size=batch),
        "max_grad_norm": norm,
    }
    run = Run(
        "shuffled_sums",
        mode,
        sigma=None,
        engine=PrivacyEngine(accountant="shuffled_sums", seed=0),
        toy=toy,
        aggregator=Noiseless(users, dimension, norm, epsilon=epsilon, delta=1e-5),
        loss_reduction="sum",
        criterion=Products(),
        **options,
    )
    run.criterion = run.criterion if mode == "ghost" else Products()
    return run


def releases(run, physical=BATCH):
    """The records of an epoch's batches, and what was released of them."""
    with run.split(physical) as batches:
        records = []
        for batch in batches:
            records.append(batch)
            run.step(batch)
            if not run.optimizer.last_step_was_skipped:
                released = [parameter.grad.flatten() for parameter in run.optimizer.params]
                together = [torch.cat(part) for part in zip(*records, strict=True)]
                yield together, torch.cat(released).cpu()
                records = []


def gradients(network, x, y):
    """Each record's gradient by autograd alone, in double precision, shape [records, entries]."""
    x, rows = x.double() if x.is_floating_point() else x, []
    for one, target in zip(x.split(1), y.double().split(1), strict=True):
        loss = Products()(network(one), target)
        parts = torch.autograd.grad(loss, list(network.parameters()), materialize_grads=True)
        rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows)


def rounding(run):
    """The most that the rounding of a sum may be off by, in norm."""
    protocol = run.optimizer.noise.protocol
    return protocol.grid_step * math.sqrt(protocol.dimension)


class Outputs(nn.Sequential):
    """Of a recurrent network without its states."""

    def forward(self, x):
        return super().forward(x)[0]


CONVOLUTION = nn.Conv2d(2, 2, 3, padding=1)
NETWORKS = {
    "layers": (nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), (5,), 3),
    "rows": (nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 2)), (6, 5), 12),
    "text": (nn.Sequential(nn.Embedding(9, 4), nn.Tanh(), nn.Linear(4, 2)), None, 12),
    "used twice": (nn.Sequential(CONVOLUTION, nn.Tanh(), CONVOLUTION), (2, 5, 5), 50),
    "recurrent": (Outputs(DPLSTM(3, 4, batch_first=True)), (5, 3), 20),
}


def problem(name):
    """A network, a copy of it in double precision, and records and targets, some of them long."""
    network, shape, outputs = copy.deepcopy(NETWORKS[name])
    torch.manual_seed(1)
    x = torch.randint(9, (USERS, 6)) if shape is None else torch.randn(USERS, *shape)
    y = torch.logspace(-3, 3, USERS)[:, None] * torch.randn(USERS, outputs)
    return network, copy.deepcopy(network).double(), x, y


@pytest.mark.parametrize(
    ("options", "physical"),
    [
        ({}, 3),
        ({"mode": "hooks"}, BATCH),
        ({"epsilon": 60.0, **SAMPLES}, BATCH),
        pytest.param({}, BATCH, marks=pytest.mark.zoo),
        pytest.param({"epsilon": 60.0, **SAMPLES}, 3, marks=pytest.mark.zoo),
    ],
)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_release_is_the_sum_of_the_clipped_gradients_of_the_records(name, options, physical):
    """Of every entry: no layer is left unclipped, left out, counted twice or in another's place."""
    network, plain, x, y = problem(name)
    lengths = gradients(plain, x, y).norm(dim=1)
    assert float(lengths.min()) < 0.2 < 10 < float(lengths.max())  # some are clipped, some are not
    run = run_of(network, x, y, **options)
    protocol = run.optimizer.noise.protocol
    for records, released in releases(run, physical):
        raw = gradients(plain, *records)
        expected = (raw / raw.norm(dim=1, keepdim=True).clamp(min=1)).sum(0)
        tolerance = protocol.grid_step + 2e-4 * len(raw)
        assert float((released - expected).abs().max()) <= tolerance
        assert float((expected.abs() > 4 * tolerance).double().mean()) > 0.1  # it can be told


@pytest.mark.parametrize("name", ["layers", "text", "recurrent"])
def test_a_batch_of_no_records_is_a_round_in_which_all_report_zero(name):
    network, _, x, y = problem(name)
    run = run_of(network, x, y, batch=1)
    empty = [released for records, released in releases(run) if not len(records[0])]
    assert len(empty) > 3
    assert run.accounted == run.updates == USERS
    assert float(torch.stack(empty).abs().max()) <= run.optimizer.noise.protocol.grid_step


@pytest.mark.parametrize("half", ["bfloat16", "autocast"])
def test_no_report_is_longer_than_the_norm_in_half_precision(half):
    """All records are the same one, so the sum is as long as the reports are together."""
    torch.manual_seed(4)
    x, y = torch.randn(1, 5).expand(BATCH, 5), 10 * torch.randn(1, 3).expand(BATCH, 3)
    dtype = torch.bfloat16 if half == "bfloat16" else torch.float32
    module = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 3)).to(dtype)
    run = run_of(module, x.to(dtype), y, **SAMPLES)
    with torch.autocast(small_runs.DEVICE.type, dtype=torch.bfloat16, enabled=half == "autocast"):
        ((_, released),) = releases(run)
    assert released.dtype == dtype
    # .grad itself is rounded to eight bits.
    assert 0.98 * BATCH < float(released.double().norm()) <= BATCH * (1 + 2**-8) + rounding(run)
