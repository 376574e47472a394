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
from opacus_shuffle.engine import records_apart
from opacus_shuffle.engine.carried_records import refuse_carried_records
from opacus_shuffle.engine.records_apart import are_apart


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
    before, network.scale = network.scale, 0.9 * network.scale + 0.1 * hidden.detach().abs().mean().item()
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


def elsewhere():
    bank = []

    def of(network, hidden):
        found = torch.zeros(6) if not bank else bank[-1]
        bank[:] = [hidden.detach().mean(0)]
        return hidden - found

    return of


CARRYING = {
    "running": [running_mean, running_mean_anew],
    "bank": [memory_bank, yes_or_no_in_a_list],
    "queue": [queue_of_rows],
    "named": [in_dictionaries],
    "state": [
        *(recurrent_state, yes_or_no, long_queue, sparse, recurrent_state_with_its_graph, array, gradients_scale, a_single_row),
        into_a_layer_that_gives_zero,
    ],
    "scale": [number],
    "(scale, (0.)?state|state, (0.)?scale|scale)": [read_two_batches_later],
    "something else than its buffers and attributes": [parameter, elsewhere()],
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


def refuse(network):
    rows = torch.randn(6, 5)
    refuse_carried_records(network.train(), lambda records: (records, ((rows[:records],), {})))


@pytest.mark.parametrize(("name", "function"), CASES)
def test_what_carries_records_into_the_next_batch_is_refused_by_its_name(name, function):
    with pytest.raises(ValueError, match=rf"^module carries records of one batch into later ones by (0\.)?{name}: a step"):
        refuse(nn.Sequential(Keeping(function)))


FLAGS = {
    "their sum is positive": lambda x, _: bool(x.sum() > 0),
    "all are positive": lambda x, _: bool((x > 0).all()),
    "some are positive": lambda x, _: bool((x > 0).any()),
    "some are negative": lambda x, _: bool((x < 0).any()),
    "some are zero": lambda x, _: bool((x == 0).any()),
    "some are large": lambda x, _: bool(x.abs().max() > 500),
    "some are no numbers": lambda x, _: bool(x.isnan().any()),
    "a number that was read is positive": lambda x, _: x.sum().item() > 0,
    "hidden units are positive": lambda _, hidden: bool(hidden.sum() > 0),
    "it was positive with gradients": lambda x, _: torch.is_grad_enabled() and bool(x.sum() > 0),
}


class Flagged(nn.Module):
    """Reads a yes or no of its records, which the next batch finds."""

    def __init__(self, flag):
        super().__init__()
        self.first, self.last, self.flag, self.seen = nn.Linear(5, 6), nn.Linear(6, 3), flag, False

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        hidden = 2 * hidden if self.seen else hidden
        self.seen = self.flag(x, hidden)
        return self.last(hidden)


@pytest.mark.parametrize("rows", [torch.linspace(-1, 1.2, 30).view(6, 5), -torch.ones(6, 5), torch.ones(6, 5)])
@pytest.mark.parametrize("flag", FLAGS.values(), ids=FLAGS)
def test_a_flag_of_records_is_refused_whatever_the_records_at_hand_are(flag, rows):
    def call_of(records):
        return records, ((rows[:records],), {})

    network = Flagged(flag).train()
    assert not are_apart(network, call_of)
    with pytest.raises(ValueError, match="carries records of one batch into later ones by seen: "):
        refuse_carried_records(network, call_of)


def counted_beside_a_decision(network, hidden):
    network.count += 1
    return hidden.clamp(max=0.5) * network.count if bool((hidden > 0.5).any()) else hidden * network.count


def noted_if_large(network, hidden):
    if bool((hidden.abs() > 0.9).any()):
        network.bank.append("large")
    return hidden


def refused_if_no_number(network, hidden):
    if bool(hidden.isnan().any()):
        network.bank.append("no number")
        raise ValueError
    return hidden


@pytest.mark.parametrize("function", [counted_beside_a_decision, noted_if_large, refused_if_no_number])
def test_what_decides_on_records_and_keeps_nothing_that_later_batches_read_is_not_refused(function):
    refuse(Keeping(function))


@pytest.mark.parametrize("function", HARMLESS)
def test_what_is_kept_and_not_read_is_not_refused(function):
    refuse(Keeping(function))


@pytest.mark.parametrize(
    "function",
    [
        *(running_mean, memory_bank, in_dictionaries, number, parameter, gradients_scale, elsewhere()),
        *(last_seen, all_seen, cleared),
    ],
)
def test_nothing_is_proved_where_records_are_kept(function, monkeypatch):
    """By following alone, without the comparison of several others."""
    monkeypatch.setattr(records_apart, "_others_do_not_matter", lambda *_, **__: True)
    rows = torch.randn(6, 5)
    assert not are_apart(Keeping(function).train(), lambda records: (records, ((rows[:records],), {})))


class Padded(nn.Module):
    """Reads whether any record is padded, and keeps a text after its first call: its own, or one that says what was read."""

    def __init__(self, tells):
        super().__init__()
        self.first, self.last, self.tells, self.kind = nn.Linear(5, 6), nn.Linear(6, 2), tells, None

    def forward(self, x, mask):
        padded = not bool(mask.all())
        if self.kind is None:
            self.kind = f"padded: {padded}" if self.tells else "rows"
        hidden = torch.tanh(self.first(x))
        return self.last(hidden * mask[:, None] if padded else hidden)


@pytest.mark.parametrize("tells", [False, True])
def test_a_text_that_is_kept_is_an_obstacle_only_if_it_tells_what_was_read(tells):
    rows, mask = torch.randn(6, 5), torch.tensor([1, 1, 0, 1, 0, 1])
    network = Padded(tells).train()
    assert are_apart(network, lambda records: (records, ((rows[:records], mask[:records]), {}))) == (not tells)


@pytest.mark.parametrize("function", [yes_or_no, yes_or_no_with_gradients])
def test_a_yes_or_no_of_records_that_is_kept_is_no_proof(function):
    rows = torch.rand(6, 5) + 1
    assert not are_apart(Keeping(function).train(), lambda records: (records, ((rows[:records],), {})))


@pytest.mark.parametrize("function", [counted, drawn])
def test_networks_that_keep_nothing_of_records_are_still_proved(function):
    rows = torch.randn(6, 5)
    assert are_apart(Keeping(function).train(), lambda records: (records, ((rows[:records],), {})))


def test_memory_that_only_refers_to_itself_is_kept_by_nobody():
    def cycle(network, hidden):
        held = [hidden]
        held.append(held)
        return hidden

    rows = torch.randn(6, 5)
    assert are_apart(Keeping(cycle).train(), lambda records: (records, ((rows[:records],), {})))


@pytest.mark.parametrize("function", [running_mean, memory_bank, queue_of_rows, in_dictionaries, number, parameter])
def test_looking_leaves_no_trace(function):
    network = Keeping(function)
    before, random_state = copy.deepcopy(network), torch.get_rng_state()
    with pytest.raises(ValueError, match="carries records"):
        refuse_carried_records(network.train(), lambda records: (records, ((torch.ones(records, 5),), {})))
    assert torch.equal(random_state, torch.get_rng_state())
    assert (network.bank, network.queue, network.named) == ([], deque(), {"states": {}})
    assert (network.scale, network.state) == (1.0, None)
    assert all(torch.equal(each, before.state_dict()[name]) for name, each in network.state_dict().items())
    assert all(each.grad is None for each in network.parameters())


def test_a_network_of_one_size_of_batches_is_looked_at_in_that():
    def in_twelves(network, hidden):
        return running_mean(network, hidden.view(-1, 12, 6).view(-1, 6))

    rows = torch.randn(12, 5)
    with pytest.raises(ValueError, match="carries records"):
        refuse_carried_records(Keeping(in_twelves).train(), lambda records: (records, ((rows[:records],), {})), more=[12])


def test_a_network_that_does_not_run_is_left_to_others():
    refuse_carried_records(
        Keeping(lambda network, hidden: hidden @ hidden), lambda records: (records, ((torch.ones(3, 5),), {}))
    )


class Loss(Keeping):
    """Returns a loss of the batch, as models with labels do."""

    def forward(self, x):
        return super().forward(x).square().mean()


def private(network, accountant="subsampled_shuffle"):
    toy = make_toy() | {"module": network, "optimizer": torch.optim.SGD(network.parameters(), lr=0.1)}
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


class Waiting(nn.Module):
    """A network that makes its records smaller until they are small enough; as ordinary ones are from the beginning."""

    def __init__(self, large):
        super().__init__()
        self.layer, self.large, self.count = nn.Linear(5, 3), large, 0

    def forward(self, x):
        while self.large(x):
            x = x / 2
        self.count += 1
        return self.layer(x)


@pytest.mark.parametrize(
    "large", [lambda x: (x.abs() > 1e6).any(), lambda x: not (x.abs() < 1e3).all(), lambda x: bool(x.norm() < 0)]
)
def test_a_loop_that_opposites_or_made_up_records_would_keep_going_ends(large):
    def call_of(records):
        return records, ((torch.randn(records, 5),), {})

    network = Waiting(large)
    are_apart(network, call_of)
    refuse_carried_records(network, call_of)
    assert network.count == 0
