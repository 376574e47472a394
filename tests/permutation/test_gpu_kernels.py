"""The same permutations are found through the kernels that a GPU has of its own.

No GPU is needed: tensors that only say that they lie on one choose its kernels, and where these
have to compute, stand-ins do.
"""

import pytest
import torch
import torch.nn.functional as F
from helpers.model_zoo import Wired, build
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from opacus_shuffle.networks.sample_input import normalise
from opacus_shuffle.permutation import find_permutations
from opacus_shuffle.permutation.finding.nesting import build_spec
from opacus_shuffle.permutation.finding.trace import Tracer
from opacus_shuffle.permutation.finding.traced_run import Findings, TracedRun


def between(middle):
    """A layer of eight units, what is to be looked at, an output layer, and five records."""

    def way(net, x):
        return net.leave(middle(net, net.enter(x)))

    return lambda **parts: (
        Wired(way, enter=nn.Linear(4, 8), leave=nn.Linear(8, 3), **parts),
        torch.randn(5, 4),
    )


def recurrent(kind, **options):
    def way(net, x):
        return net.leave(net.layer(net.enter(x))[0])

    width = options.get("proj_size", 6) * (2 if options.get("bidirectional") else 1)
    parts = {"enter": nn.Linear(4, 8), "layer": kind(8, 6, **options), "leave": nn.Linear(width, 3)}
    return Wired(way, **parts), torch.randn(5, 2, 4)


def attention(_, h):
    query = h.unsqueeze(1).expand(5, 3, 8).reshape(5, 3, 2, 4).transpose(1, 2)
    return (
        F.scaled_dot_product_attention(query, query, query, dropout_p=0.2)
        .transpose(1, 2)
        .reshape(5, 3, 8)
        .sum(1)
    )


ON_A_GPU = {
    "dropout": lambda: between(lambda _, h: F.dropout(h, 0.1, training=True))(),
    "elman": lambda: recurrent(nn.RNN, num_layers=2, dropout=0.1),
    "layer_norm": lambda: between(lambda net, h: net.norm(h))(norm=nn.LayerNorm(8)),
    "rms_norm": lambda: between(lambda net, h: net.norm(h))(norm=nn.RMSNorm(8)),
    "group_norm": lambda: between(lambda net, h: net.norm(h))(norm=nn.GroupNorm(2, 8)),
    "batch_norm": lambda: between(lambda net, h: net.norm(h))(
        norm=nn.BatchNorm1d(8, track_running_stats=False)
    ),
    "convolution": lambda: (
        nn.Sequential(nn.Conv1d(3, 6, 2, bias=False), nn.ReLU(), nn.Conv1d(6, 2, 1)),
        torch.randn(2, 3, 5),
    ),
    "attention": lambda: between(attention)(),
}


def labelled(network, sample):
    """The group that tracing alone finds, without other inputs and without a check."""
    findings = Findings()
    args, _ = normalise(sample)
    for _ in range(3):
        run = TracedRun(network, findings)
        for training in (True, False):
            with torch.no_grad():
                Tracer(network.train(training), run).trace(lambda: network(*args))
    assert not run.unknown
    return build_spec(run, "residual")


def as_on_a_gpu(tensor):
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")


@pytest.mark.parametrize("name", ON_A_GPU)
def test_kernels_that_a_gpu_chooses_leave_the_same_permutations(name):
    network, sample = build(ON_A_GPU[name])
    here = labelled(network, sample)
    with FakeTensorMode(), torch.no_grad():
        for part in network.modules():
            for key, tensor in part._parameters.items():
                part._parameters[key] = (
                    None if tensor is None else nn.Parameter(as_on_a_gpu(tensor))
                )
        there = labelled(network, tree_map_only(torch.Tensor, as_on_a_gpu, sample))
    assert there.log2_size() == pytest.approx(here.log2_size())
    assert there.shapes == here.shapes
    assert [there.smallest_orbit(name) for name in there.shapes] == [
        here.smallest_orbit(name) for name in here.shapes
    ]


@pytest.mark.parametrize(
    "draw",
    [
        lambda h: torch.normal(h, h.exp()),
        lambda h: torch.poisson(h.exp()),
        lambda h: h + torch.empty_like(h).log_normal_(),
        lambda h: torch.distributions.Normal(h, 1.0).rsample(),
    ],
    ids=["normal", "poisson", "log_normal", "distribution"],
)
def test_noise_of_every_kind_that_treats_entries_alike_moves_nothing(draw):
    spec = find_permutations(*build(lambda: between(lambda _, h: draw(h))()))
    assert 2 ** spec.log2_size() == pytest.approx(40320)  # 8!
