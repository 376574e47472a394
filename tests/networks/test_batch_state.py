"""Networks by which records of one batch act on the next are refused; what is kept is named."""

from __future__ import annotations

import copy
import warnings
from collections import deque

import pytest
import torch
from helpers.toy import make_toy, run_epoch
from torch import nn

from opacus_shuffle import PrivacyEngine
from opacus_shuffle.core.guarantees import PrivacyAssumptionWarning
from opacus_shuffle.networks.check import per_sample_check


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


class Keeping(nn.Module):
    """A network that does something with its hidden batch and with what it keeps."""

    def __init__(self, function):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(5, 6), nn.Linear(6, 3), function
        self.adapter = nn.Linear(6, 6)
        nn.init.zeros_(self.adapter.weight)
        nn.init.zeros_(self.adapter.bias)
        self.register_buffer("running", torch.zeros(6))
        self.register_parameter("centre", nn.Parameter(torch.zeros(6), requires_grad=False))
        self.bank, self.queue, self.named = [], deque(maxlen=64), {"states": {}}
        self.state, self.count = None, 0
        self.draws = torch.Generator().manual_seed(0)

    def forward(self, x):
        return self.last(self.function(self, torch.tanh(self.first(x))))


class Loss(Keeping):
    """Returns a loss of the batch, as models with labels do."""

    def forward(self, x):
        return super().forward(x).square().mean()


def keeps(write, read=lambda net, hidden, before: hidden + before):
    """A function that keeps something of a batch, and reads it with the next."""

    def function(net, hidden):
        before, net.state = net.state, write(hidden)
        return hidden if before is None else read(net, hidden, before)

    return function


def running_mean(net, hidden):
    before = net.running.clone()
    net.running.lerp_(hidden.detach().mean(0), 0.01)
    return hidden - before


def running_mean_anew(net, hidden):
    before, net.running = net.running, 0.9 * net.running + 0.1 * hidden.detach().mean(0)
    return hidden - before


def frozen_parameter(net, hidden):
    before = net.centre.detach().clone()
    net.centre.data.lerp_(hidden.detach().mean(0), 0.1)
    return hidden - before


def memory_bank(net, hidden):
    bank = torch.cat([torch.zeros(1, 6), *net.bank])
    net.bank.append(hidden.detach())
    return hidden + torch.softmax(hidden @ bank.T, 1) @ bank


def queue_of_rows(net, hidden):
    rows = sum(net.queue, torch.zeros(6))
    net.queue.extend(hidden.detach())
    return hidden + rows


def dictionary(net, hidden):
    states = net.named["states"]
    before, states["hidden"] = states.get("hidden", hidden), hidden.detach()
    return hidden + before.mean(0).detach() * (before is not hidden)


def long_queue(net, hidden):
    """Contrasts each record with thousands of earlier ones, of which a batch replaces few."""
    if net.state is None:
        net.state = torch.randn(2**16, 6, generator=torch.Generator().manual_seed(0))
    losses = torch.logsumexp(hidden @ net.state.T, 1)
    net.state = torch.cat([net.state[len(hidden) :], hidden.detach()])
    return losses[:, None].expand(-1, 6)


CARRYING = {
    "running mean": (running_mean, "running"),
    "running mean anew": (running_mean_anew, "running"),
    "frozen parameter": (frozen_parameter, "centre"),
    "memory bank": (memory_bank, "bank"),
    "queue of rows": (queue_of_rows, "queue"),
    "dictionary": (dictionary, "named.states.hidden"),
    "long queue": (long_queue, "state"),
    "recurrent state": (keeps(torch.Tensor.detach), "state"),
    "recurrent state and its graph": (keeps(torch.clone), "state"),
    "one row": (keeps(lambda hidden: hidden.detach()[0]), "state"),
    "number": (keeps(lambda hidden: hidden.mean().item()), "state"),
    "flag": (
        keeps(
            lambda hidden: bool(hidden[0, 0] > 0),
            lambda net, hidden, before: hidden * (2 if before else 1),
        ),
        "state",
    ),
    "array": (
        keeps(
            lambda hidden: hidden.detach().numpy().mean(0),
            lambda net, hidden, before: hidden - torch.from_numpy(before),
        ),
        "state",
    ),
    "sparse": (
        keeps(
            lambda hidden: hidden.detach().to_sparse(),
            lambda net, hidden, before: hidden + before.to_dense(),
        ),
        "state",
    ),
    "into a layer that gives zero": (
        keeps(torch.Tensor.detach, lambda net, hidden, before: hidden + net.adapter(before)),
        "state",
    ),
}


@pytest.mark.parametrize("way", CARRYING)
def test_what_carries_records_into_later_batches_is_refused_by_its_name_and_left_as_it_was(way):
    function, name = CARRYING[way]
    network = nn.Sequential(Keeping(function)).train()
    network[0].first.weight.grad = torch.ones(6, 5)
    before, random_state = copy.deepcopy(network), torch.get_rng_state()
    check = per_sample_check(network, ((torch.ones(6, 5).cumsum(0) - 3,), {}))
    carried = f"module carries records of one batch into later ones by 0.{name}: a step"
    assert check.problem.startswith(carried)
    assert torch.equal(random_state, torch.get_rng_state())
    for key, tensor in network.state_dict().items():
        assert torch.equal(tensor, before.state_dict()[key])
    keeping = network[0]
    assert (keeping.bank, keeping.queue, keeping.named) == ([], deque(), {"states": {}})
    assert keeping.state is None
    gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    assert torch.equal(gradients.pop("0.first.weight"), torch.ones(6, 5))
    assert not gradients


def counted(net, hidden):
    net.count += len(hidden)
    return hidden * (1 + 1 / net.count)


def named(net, hidden):
    net.state = "regression"
    return hidden


HARMLESS = {
    "last batch": (keeps(torch.Tensor.detach, lambda net, hidden, before: hidden), ["state"]),
    "all batches": (lambda net, hidden: (net.bank.append(hidden.detach()), hidden)[1], ["bank"]),
    "unread mean": (
        lambda net, hidden: (net.running.lerp_(hidden.detach().mean(0), 0.1), hidden)[1],
        ["running"],
    ),
    "count": (counted, []),
    "name": (named, []),
    "draws": (lambda net, hidden: hidden * torch.rand(()), []),
    "draws of its own": (lambda net, hidden: hidden * torch.rand((), generator=net.draws), []),
    "not finite": (lambda net, hidden: hidden / 0.0, []),
    "nothing": (lambda net, hidden: hidden, []),
}


@pytest.mark.parametrize("way", HARMLESS)
def test_what_is_kept_and_not_read_is_named_and_not_refused(way):
    function, kept = HARMLESS[way]
    check = per_sample_check(Keeping(function), ((torch.randn(6, 5),), {}))
    assert (check.seen, check.problem, list(check.kept)) == (True, "", kept)


def private(network, accountant="subsampled_shuffle"):
    network.adapter.requires_grad_(False)
    optimizer = torch.optim.SGD([*network.first.parameters(), *network.last.parameters()], lr=0.1)
    toy = make_toy() | {"module": network, "optimizer": optimizer}
    return PrivacyEngine(accountant=accountant).make_private(noise_multiplier=1.0, **toy)


@pytest.mark.parametrize("kind", [Keeping, Loss])
@pytest.mark.parametrize("accountant", ["subsampled_shuffle", "rdp"])
def test_make_private_refuses_it(kind, accountant):
    network = kind(memory_bank)
    with pytest.raises(ValueError, match=r"carries records of one batch into later ones by bank: "):
        private(network, accountant)
    assert not hasattr(network, "autograd_grad_sample_hooks")
    assert not network.bank


def test_a_network_that_keeps_what_it_has_seen_is_trained_with_one_warning():
    network = Keeping(HARMLESS["last batch"][0])
    with pytest.warns(PrivacyAssumptionWarning, match=r"buffer 'state' of the network changes"):
        made = private(network)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyAssumptionWarning)
        run_epoch(*made)
    assert network.state is not None
