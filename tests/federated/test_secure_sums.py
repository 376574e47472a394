"""Sums of bits through Flower's SecAgg+: the same counts, nothing else, and no sum of too few."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("flwr.client", reason="needs the extra federated")

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.server import LegacyContext, ServerConfig
from flwr.server.workflow import DefaultWorkflow

import opacus_shuffle
from opacus_shuffle.federated import BitSums, GaussianReports, Ledger
from opacus_shuffle.federated.flower import LocalGrid
from opacus_shuffle.federated.flower.secure_sums import (
    SecureSumClient,
    SecureSums,
    SecureSumStrategy,
)
from opacus_shuffle.protocols.modular_sums import smallest_modulus, unwrapped

CLIENTS, D = 7, 6
REPORTS = {
    "dimension": D,
    "max_norm": 1.0,
    "noise_multiplier": 1.0,
    "num_users": CLIENTS,
    "delta": 1e-6,
    "min_reports": 5,
}


class Aggregation:
    """Clients and a server of the older workflow in this process.

    Args:
        gone: The stage from which on some clients answer nothing, by their number.
        tamper: Changes what the server asks, with the numbers of all nodes at hand.
        clients: How many there are.
        bits: In place of the format's own number of a coordinate's bits.
    """

    def __init__(
        self,
        gone=None,
        *,
        tamper=lambda asked, nodes: None,
        max_rounds: int = 10,
        clients: int = CLIENTS,
        bits: int | None = None,
        **options,
    ):
        self.reports = BitSums(**{**REPORTS, "num_users": clients})
        self.reports.bits = self.reports.bits if bits is None else bits
        self.sums = SecureSums(self.reports, simulated=True)
        self.sent: list[np.ndarray] = []
        self.replies: list[Message] = []
        arrays_of = self.sums.arrays_of

        def watched(report):
            self.sent.append(self.reports.counts_of(self.reports.open(report)[1]))
            return arrays_of(report)

        self.sums.arrays_of = watched

        def client(context: Context):
            def train(weights):
                return [array + context.node_config["partition-id"] / 10 for array in weights]

            return SecureSumClient(
                self.sums, context, train, max_rounds=max_rounds, book=None
            ).to_client()

        app = ClientApp(client_fn=client, mods=[self.sums.mod])

        def answer(message: Message, context: Context) -> Message:
            asked = message.content.config_records["secaggplus_configs"]
            tamper(asked, self.grid.get_node_ids())
            if asked["stage"] == (gone or {}).get(context.node_config["partition-id"]):
                return Message(Error(code=1, reason="gone"), reply_to=message)
            reply = app(message, context)
            self.replies.append(reply)
            return reply

        self.ledger = Ledger(self.reports, self.sums, delta=1e-5, **options)
        weights = [np.zeros((2, 2), np.float32), np.zeros(2, np.float32)]
        self.strategy = SecureSumStrategy(self.ledger, weights, learning_rate=clients)
        self.grid = LocalGrid(answer, clients)

    def run(self, rounds: int = 1) -> Aggregation:
        context = Context(run_id=0, node_id=0, node_config={}, state=RecordDict(), run_config={})
        server = LegacyContext(context, ServerConfig(num_rounds=rounds), self.strategy)
        DefaultWorkflow(fit_workflow=self.sums.workflow())(self.grid, server)
        return self

    @property
    def answers(self) -> list:
        """What clients answered, stage by stage."""
        return [
            record for reply in self.replies for record in reply.content.config_records.values()
        ]

    @property
    def moved(self) -> torch.Tensor:
        """What the weights have moved by, in all."""
        return torch.cat([torch.from_numpy(array.reshape(-1)) for array in self.strategy.weights])

    @property
    def expected(self) -> torch.Tensor:
        """What the counts that were sent decode to."""
        counts = torch.from_numpy(sum(self.sent))
        return self.reports.protocol.decode(counts, len(self.sent)).float()


def test_nothing_that_a_client_sends_tells_its_counts():
    """A masked count is the client's own by chance once in M, and there are d of them."""
    aggregation = Aggregation().run()
    assert aggregation.sums.modulus >= 64
    for reply in aggregation.replies:
        assert not any(record.keys() for record in reply.content.array_records.values())
        for name, record in reply.content.metric_records.items():
            assert dict(record) == ({"num_examples": 1} if name == "fitres.num_examples" else {})
    assert sum("masked_params" in record for record in aggregation.answers) == CLIENTS
    assert aggregation.ledger.report().simulated


@pytest.mark.parametrize(
    ("stage", "reports"),
    [
        (None, CLIENTS),
        ("setup", 0),
        ("share_keys", 0),
        ("collect_masked_vectors", CLIENTS - 2),
        ("unmask", CLIENTS),
    ],
)
def test_the_server_gets_the_sum_of_the_counts_of_those_that_are_there_to_the_last_bit(
    stage, reports
):
    """Who drops out before keys were shared halts the round: Flower asks for shares of its keys.

    Later the others' shares unmask the sum of what was sent.
    """
    aggregation = Aggregation({0: stage, 3: stage} if stage else None).run()
    if reports:
        assert len(aggregation.sent) == reports
        assert torch.equal(aggregation.moved, aggregation.expected)
    assert bool(aggregation.moved.any()) == (reports > 0)
    assert len(aggregation.ledger.accountant) == 1


def test_a_sum_of_too_few_clients_is_not_unmasked_and_its_rounds_are_accounted():
    gone = {0: "collect_masked_vectors", 1: "share_keys", 2: "collect_masked_vectors"}
    aggregation = Aggregation(gone).run(2)
    assert not aggregation.moved.any()
    assert aggregation.ledger.epsilon().epsilon == opacus_shuffle.compute_epsilon(
        aggregation.reports.mechanism, steps=2, delta=1e-5
    )


def lying(stage, change):
    """A server that changes what it asks at one stage, by what it would ask and all nodes."""

    def tamper(asked, nodes):
        if asked["stage"] == stage:
            for name, value in change(asked, list(nodes)).items():
                asked[name] = value

    return tamper


def keys_of(count):
    """Says that only so many clients shared their keys with one that did."""
    return lying(
        "collect_masked_vectors",
        lambda asked, _: {name: asked[name][: count - 1] for name in ("srcs", "ctxts")},
    )


@pytest.mark.parametrize(
    "change",
    [
        {"threshold": 4},
        {"mod_range": 2**30},
        {"target_range": 2**12},
        {"clipping_range": 1.0},
        {"max_weight": 1.0},
        {"share_num": 6},
        {"sample_num": 8, "share_num": 8},
    ],
)
def test_clients_refuse_a_server_that_asks_for_other_settings(change):
    aggregation = Aggregation(tamper=lying("setup", lambda asked, _: change)).run()
    assert aggregation.sent == []
    assert not aggregation.moved.any()


@pytest.mark.parametrize(("count", "answers"), [(4, 0), (5, CLIENTS)])
def test_a_client_masks_its_counts_for_the_fewest_clients_that_it_agreed_to_and_not_for_one_less(
    count, answers
):
    assert len(Aggregation(tamper=keys_of(count)).run().sent) == answers


@pytest.mark.parametrize(("count", "answers"), [(4, 0), (5, 5), (6, 6)])
def test_a_client_helps_to_unmask_the_sum_of_the_fewest_and_not_of_one_less(count, answers):
    gone = dict.fromkeys(range(CLIENTS - count), "collect_masked_vectors")
    aggregation = Aggregation(gone).run()
    assert sum("shares" in record for record in aggregation.answers) == answers
    assert bool(aggregation.moved.any()) == (answers > 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda nodes: {"active_nids": nodes, "dead_nids": nodes},
        lambda nodes: {"active_nids": nodes[:1] * 5, "dead_nids": nodes[1:]},
        lambda nodes: {"active_nids": nodes[:4], "dead_nids": nodes[4:]},
    ],
    ids=["everyone is both", "one client many times", "only a few"],
)
def test_clients_help_to_unmask_nothing_but_the_sum_of_enough_of_them(change):
    """A server with both kinds of a client's shares, or all of one kind, reads its counts."""
    aggregation = Aggregation(tamper=lying("unmask", lambda _, nodes: change(nodes))).run()
    assert not any("shares" in record for record in aggregation.answers)
    assert not aggregation.moved.any()
    assert len(aggregation.ledger.accountant) == 1


@pytest.mark.parametrize("share", [0, 1, 2])
@pytest.mark.parametrize("bits", [32, *(pytest.param(n, marks=pytest.mark.zoo) for n in (31, 64))])
def test_the_largest_sums_of_counts_decode_also_where_they_are_powers_of_two(share, bits):
    """Every client sends the same count; sums of eight of them are powers of two themselves."""
    aggregation, count = Aggregation(clients=8, bits=bits), share * bits // 2
    aggregation.reports.randomize = lambda vector, generator: np.full(D, count, np.uint8).tobytes()
    aggregation.run()
    assert [counts.tolist() for counts in aggregation.sent] == [[count] * D] * 8
    assert torch.equal(aggregation.moved, aggregation.expected)


@pytest.mark.parametrize("largest", [None, 0.0, 1.0, 1e6])
@pytest.mark.parametrize("clients", [3, 300])
def test_the_modulus_is_never_below_the_smallest_that_decodes(clients, largest):
    """Sums of counts from end to end of what is promised, by default of all, from residues."""
    reports = BitSums(**{**REPORTS, "num_users": clients, "min_reports": clients})
    modulus = SecureSums(reports, largest_coordinate=largest).modulus
    assert modulus >= smallest_modulus(reports.protocol, largest)
    middle, most = reports.protocol.expected_ones(clients), clients * reports.bits
    reach = np.inf
    if largest is not None:
        reach = (largest + 6 * reports.protocol.variance**0.5) / reports.protocol.grid_step
    ends = [np.ceil(max(0, middle - reach)), np.floor(min(most, middle + reach))]
    counts = torch.from_numpy(np.linspace(*ends, D).astype(np.int64))
    assert torch.equal(unwrapped(reports.protocol, counts % modulus, clients, modulus), counts)


@pytest.mark.parametrize("limit", ["target_epsilon", "max_rounds"])
def test_when_the_target_or_what_clients_agreed_to_is_reached_nobody_answers_any_more(limit):
    price = opacus_shuffle.compute_epsilon(BitSums(**REPORTS).mechanism, steps=1, delta=1e-5)
    aggregation = Aggregation(**{limit: price if limit == "target_epsilon" else 1})
    assert aggregation.ledger.affordable(3) == (1 if limit == "target_epsilon" else 3)
    aggregation.run(3)
    assert len(aggregation.ledger.accountant) == (1 if limit == "target_epsilon" else 3)
    assert len(aggregation.sent) == CLIENTS


@pytest.mark.parametrize(
    ("average", "reports", "named"),
    [
        ([np.full(D, np.nan)], 7, "average"),
        ([np.zeros(D + 1)], 7, "average"),
        ([np.full(D, 50.0)], 7, "average"),
        ([np.zeros(D)], 4, "num_reports"),
        ([np.zeros(D)], 8, "num_reports"),
    ],
)
def test_an_average_that_is_none_of_counts_is_refused(average, reports, named):
    aggregation = Aggregation()
    with pytest.raises(ValueError, match="no round is open"):
        aggregation.sums.aggregated(average, reports)
    aggregation.ledger.open()
    with pytest.raises(ValueError, match=named):
        aggregation.sums.aggregated(average, reports)


def without_the_mod():
    context = Context(run_id=0, node_id=2, node_config={}, state=RecordDict(), run_config={})
    sums = SecureSums(BitSums(**REPORTS))
    client = SecureSumClient(sums, context, lambda weights: weights, max_rounds=1, book=None)
    client.fit([np.zeros(D)], {"round": 1})


EIGHT = {**REPORTS, "num_users": 8}
OTHER = {**REPORTS, "noise_multiplier": 0.5}


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: SecureSums(BitSums(**{**EIGHT, "min_reports": 4})), "more than half must be"),
        (lambda: SecureSums(BitSums(**EIGHT, honest_fraction=0.75)), "and the dishonest ones"),
        (lambda: SecureSums(GaussianReports.of_settings(GAUSSIAN)), "format must be a BitSums"),
        (
            lambda: Ledger(BitSums(**OTHER), Aggregation().sums, delta=1e-5).open(),
            "goes by other settings",
        ),
        (without_the_mod, r"mods=\[sums\.mod\]"),
    ],
)
def test_what_would_be_a_sum_of_too_few_or_of_none_is_refused(call, named):
    with pytest.raises(ValueError, match=named):
        call()


GAUSSIAN = {name: REPORTS[name] for name in ("dimension", "max_norm", "noise_multiplier")}
GAUSSIAN |= {"kind": "gaussian_reports", "num_users": 3}
