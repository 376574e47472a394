"""A network by which records of one batch act on later ones is refused by name; what is only kept is not."""

from __future__ import annotations

import copy
import secrets
from collections import deque

import pytest
import torch
from helpers.toy import make_toy
from torch import nn

from opacus_shuffle import PrivacyEngine
from opacus_shuffle.networks.batch_state import check_batch_state
from opacus_shuffle.networks.check import per_sample_check


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
        self.state, self.scale, self.count = None, 1.0, 0

    def forward(self, x):
        return self.last(self.function(self, torch.tanh(self.first(x))))


def running_mean(network, hidden):
    before = network.running.clone()
    network.running.lerp_(hidden.detach().mean(0), 0.01)
    return hidden - before


def running_mean_anew(network, hidden):
    before, network.running = network.running, 0.9 * network.running + 0.1 * hidden.detach().mean(0)
    return hidden - before


def memory_bank(network, hidden):
    bank = torch.cat([torch.zeros(1, 6), *network.bank])
    network.bank.append(hidden.detach())
    return hidden + torch.softmax(hidden @ bank.T, 1) @ bank


def queue_of_rows(network, hidden):
    found = sum(network.queue, torch.zeros(6))
    network.queue.extend(hidden.detach())
    return hidden + found


def in_dictionaries(network, hidden):
    states = network.named["states"]
    before, states["hidden"] = states.get("hidden"), hidden.detach()
    return hidden if before is None else hidden + before.mean(0)


def recurrent_state(network, hidden):
    before, network.state = network.state, hidden.detach()
    return hidden if before is None else hidden + 0.5 * before


def recurrent_state_with_its_graph(network, hidden):
    before, network.state = network.state, hidden
    return hidden if before is None else hidden + 0.5 * before


def number(network, hidden):
    before, network.scale = (
        network.scale,
        0.9 * network.scale + 0.1 * hidden.detach().abs().mean().item(),
    )
    return hidden / before


def array(network, hidden):
    before, network.state = network.state, hidden.detach().numpy().mean(0)
    return hidden if before is None else hidden - torch.from_numpy(before)


def long_queue(network, hidden):
    """Contrasts each record with thousands of earlier ones, of which a batch replaces few."""
    if network.state is None:
        network.state = torch.randn(2**16, 6, generator=torch.Generator().manual_seed(0))
    losses = torch.logsumexp(hidden @ network.state.T, 1)
    network.state = torch.cat([network.state[len(hidden) :], hidden.detach()])
    return losses[:, None].expand(-1, 6)


def sparse(network, hidden):
    before, network.state = network.state, hidden.detach().to_sparse()
    return hidden if before is None else hidden + before.to_dense()


def yes_or_no(network, hidden):
    before, network.state = network.state, bool((hidden.detach()[:, 0] > 0.2).any())
    return 2 * hidden if before else hidden


def yes_or_no_with_gradients(network, hidden):
    before = network.state
    if torch.is_grad_enabled():
        network.state = bool((hidden.detach()[:, 0] > 0.2).any())
    return 2 * hidden if before else hidden


def yes_or_no_in_a_list(network, hidden):
    found = sum(network.bank)
    network.bank.append(bool((hidden.detach()[:, 0] > 0.2).any()))
    return hidden * (1 + found)  # of several records, some are larger and some are not


def read_two_batches_later(network, hidden):
    before, network.state = network.state, network.scale
    network.scale = hidden.detach().mean().item()
    return hidden if before is None else hidden + before


def parameter(network, hidden):
    before = network.centre.detach().clone()
    network.centre.data.lerp_(hidden.detach().mean(0), 0.1)
    return hidden - before


def gradients_scale(network, hidden):
    def hook(gradient):
        before, network.state = network.state, gradient.abs().mean()
        return gradient if before is None else gradient / before

    hidden = hidden * 1
    if hidden.requires_grad:
        hidden.register_hook(hook)
    return hidden


def a_single_row(network, hidden):
    before, network.state = network.state, hidden.detach()[0]
    return hidden if before is None else hidden + before


def into_a_layer_that_gives_zero(network, hidden):
    before, network.state = network.state, hidden.detach()
    return hidden if before is None else hidden + network.adapter(before)


CARRYING = {
    "running": [running_mean, running_mean_anew],
    "bank": [memory_bank, yes_or_no_in_a_list],
    "queue": [queue_of_rows],
    "named.states.hidden": [in_dictionaries],
    "state": [
        *(
            recurrent_state,
            yes_or_no,
            long_queue,
            sparse,
            recurrent_state_with_its_graph,
            array,
            gradients_scale,
            a_single_row,
        ),
        into_a_layer_that_gives_zero,
    ],
    "scale": [number],
    "(scale, (0.)?state|state, (0.)?scale|scale)": [read_two_batches_later],
    "centre": [parameter],
}
CASES = [(name, each) for name, several in CARRYING.items() for each in several]


def last_seen(network, hidden):
    network.state = hidden.detach()
    return hidden


def all_seen(network, hidden):
    network.bank.append(hidden.detach())
    network.named["states"][len(network.bank)] = hidden.detach()
    return hidden


def unread_mean(network, hidden):
    network.running.lerp_(hidden.detach().mean(0), 0.1)
    return hidden


def cleared(network, hidden):
    network.bank.clear()
    network.bank.append(hidden)
    return hidden + network.bank[-1]


def counted(network, hidden):
    network.count += len(hidden)
    return hidden * (1 + 1 / network.count)


def drawn(network, hidden):
    return hidden * torch.rand(())


def drawn_anew(network, hidden):
    return hidden + torch.rand(6, generator=torch.Generator().manual_seed(secrets.randbits(32)))


def not_finite(network, hidden):
    return hidden / 0.0


ONLY_KEPT = [last_seen, all_seen, unread_mean, cleared]
HARMLESS = [*ONLY_KEPT, counted, drawn, drawn_anew, not_finite]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def check(network, rows=None):
    rows = torch.randn(6, 5) if rows is None else rows
    seen = per_sample_check(
        network.train(), lambda records: ((rows[torch.arange(records) % 6],), {})
    )
    check_batch_state(network, seen.changed, seen.call, seen.records)


@pytest.mark.parametrize(("name", "function"), CASES)
def test_what_carries_records_into_the_next_batch_is_refused_by_its_name_and_left_as_it_was(
    name, function
):
    network = nn.Sequential(Keeping(function))
    before, random_state = copy.deepcopy(network), torch.get_rng_state()
    rows = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    with pytest.raises(
        ValueError,
        match=rf"^module carries records of one batch into later ones by (0\.)?{name}: a step",
    ):
        check(network, rows)
    assert torch.equal(random_state, torch.get_rng_state())
    keeping = network[0]
    assert (keeping.bank, keeping.queue, keeping.named) == ([], deque(), {"states": {}})
    assert (keeping.scale, keeping.state) == (1.0, None)
    assert all(
        torch.equal(tensor, before.state_dict()[key])
        for key, tensor in network.state_dict().items()
    )
    assert all(parameter.grad is None for parameter in network.parameters())


FLAGS = {
    "their sum is positive": lambda x, _: bool(x.sum() > 0),
    "all are positive": lambda x, _: bool((x > 0).all()),
    "some are positive": lambda x, _: bool((x > 0).any()),
    "some are negative": lambda x, _: bool((x < 0).any()),
    "some are zero": lambda x, _: bool((x == 0).any()),
    "some are large": lambda x, _: bool(x.abs().max() > 500),
    "a number that was read is positive": lambda x, _: x.sum().item() > 0,
    "hidden units are positive": lambda _, hidden: bool(hidden.sum() > 0),
    "it was positive with gradients": lambda x, _: torch.is_grad_enabled() and bool(x.sum() > 0),
}


class Flagged(nn.Module):
    """Reads a yes or no of its records, which the next batch finds."""

    def __init__(self, flag):
        super().__init__()
        self.first, self.last, self.flag, self.seen = nn.Linear(5, 6), nn.Linear(6, 3), flag, None

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        hidden = 2 * hidden if self.seen else hidden
        self.seen = self.flag(x, hidden)
        return self.last(hidden)


@pytest.mark.parametrize(
    "rows", [torch.linspace(-1, 1.2, 30).view(6, 5), -torch.ones(6, 5), torch.ones(6, 5)]
)
@pytest.mark.parametrize("flag", FLAGS.values(), ids=FLAGS)
def test_a_flag_of_records_is_refused_whatever_the_records_at_hand_are(flag, rows):
    with pytest.raises(ValueError, match="carries records of one batch into later ones by seen: "):
        check(Flagged(flag), rows)


def counted_beside_a_decision(network, hidden):
    network.count += 1
    return (
        hidden.clamp(max=0.5) * network.count
        if bool((hidden > 0.5).any())
        else hidden * network.count
    )


def noted_if_large(network, hidden):
    if bool((hidden.abs() > 0.9).any()):
        network.bank.append("large")
    return hidden


@pytest.mark.parametrize("function", [*HARMLESS, counted_beside_a_decision, noted_if_large])
def test_what_is_kept_and_not_read_is_not_refused(function):
    check(Keeping(function))


class Loss(Keeping):
    """Returns a loss of the batch, as models with labels do."""

    def forward(self, x):
        return super().forward(x).square().mean()


def private(network, accountant="subsampled_shuffle"):
    toy = make_toy() | {
        "module": network,
        "optimizer": torch.optim.SGD(network.parameters(), lr=0.1),
    }
    engine = PrivacyEngine(accountant=accountant)
    return engine, engine.make_private(noise_multiplier=1.0, **toy)


@pytest.mark.parametrize("kind", [Keeping, Loss])
@pytest.mark.parametrize("accountant", ["subsampled_shuffle", "rdp"])
def test_make_private_refuses_it(kind, accountant):
    network = kind(memory_bank)
    with pytest.raises(ValueError, match=r"carries records of one batch into later ones by bank: "):
        private(network, accountant)
    assert not hasattr(network, "autograd_grad_sample_hooks")
    assert not network.bank


@pytest.mark.filterwarnings("ignore:buffer")
def test_a_network_that_keeps_what_it_has_seen_is_trained():
    network = Keeping(last_seen)
    network.adapter.requires_grad_(False)
    engine, (model, optimizer, loader) = private(network)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert len(engine.accountant) == 4
    assert network.state is not None
