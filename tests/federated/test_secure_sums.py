"""Sums of bits through Flower's SecAgg+: the same counts, nothing else, and no sum of too few clients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("flwr.client", reason="needs the extra federated")

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.server import LegacyContext, ServerConfig
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow

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
        workflow=None,
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
            self.sent.append(self.reports.counts_of(self.reports.open(report).numbers))
            return arrays_of(report)

        self.sums.arrays_of = watched

        def client(context: Context):
            def train(weights):
                return [each + context.node_config["partition-id"] / 10 for each in weights]

            return SecureSumClient(
                self.sums, context, train, max_rounds=max_rounds, book=None
            ).to_client()

        app = ClientApp(client_fn=client, mods=[self.sums.mod])

        def answer(message: Message, context: Context) -> Message:
            asked = message.content.config_records["secaggplus_configs"]
            tamper(asked, self.grid.get_node_ids())
            stage = asked["stage"]
            if stage == (gone or {}).get(context.node_config["partition-id"]):
                return Message(Error(code=1, reason="gone"), reply_to=message)
            reply = app(message, context)
            self.replies.append(reply)
            return reply

        self.ledger = Ledger(self.reports, self.sums, delta=1e-5, **options)
        weights = [np.zeros((2, 2), np.float32), np.zeros(2, np.float32)]
        self.strategy = SecureSumStrategy(self.ledger, weights, learning_rate=clients)
        self.grid, self.workflow = LocalGrid(answer, clients), workflow or self.sums.workflow()

    def run(self, rounds: int = 1):
        context = Context(run_id=0, node_id=0, node_config={}, state=RecordDict(), run_config={})
        server = LegacyContext(context, ServerConfig(num_rounds=rounds), self.strategy)
        DefaultWorkflow(fit_workflow=self.workflow)(self.grid, server)

    @property
    def answers(self) -> list:
        """What clients answered, stage by stage."""
        return [
            record for reply in self.replies for record in reply.content.config_records.values()
        ]

    @property
    def moved(self) -> torch.Tensor:
        """What the weights have moved by, in all."""
        return torch.cat(
            [torch.from_numpy(each.reshape(-1)) for each in self.strategy.weights]
        ).double()


def test_the_server_gets_the_sum_of_the_clients_counts_to_the_last_bit():
    aggregation = Aggregation()
    aggregation.run()
    assert len(aggregation.sent) == CLIENTS
    expected = aggregation.reports.protocol.decode(torch.from_numpy(sum(aggregation.sent)), CLIENTS)
    assert torch.equal(aggregation.moved, expected.float().double())
    assert len(aggregation.ledger.accountant) == 1
    assert aggregation.ledger.report().simulated


def test_nothing_that_a_client_sends_tells_its_counts():
    """A masked count is the client's own by chance once in M, and there are d of them."""
    aggregation = Aggregation()
    aggregation.run()
    assert aggregation.sums.modulus >= 64
    for reply in aggregation.replies:
        assert not any(record.keys() for record in reply.content.array_records.values())
        for name, record in reply.content.metric_records.items():
            assert (name, dict(record)) in (
                ("fitres.num_examples", {"num_examples": 1}),
                ("fitres.metrics", {}),
            )
    assert sum("masked_params" in record for record in aggregation.answers) == CLIENTS


@pytest.mark.parametrize("stage", ["setup", "share_keys"])
def test_clients_that_drop_out_before_they_have_shared_keys_halt_a_round_that_stays_accounted(
    stage,
):
    """Flower's workflow asks for shares of their keys, which nobody has."""
    aggregation = Aggregation({0: stage, 3: stage})
    aggregation.run()
    assert not aggregation.moved.any()
    assert len(aggregation.ledger.accountant) == 1


@pytest.mark.parametrize("stage", ["collect_masked_vectors", "unmask"])
def test_clients_that_drop_out_take_their_counts_with_them(stage):
    """Unless they sent them masked: then the others' shares unmask the sum."""
    aggregation = Aggregation({0: stage, 3: stage})
    aggregation.run()
    reports = CLIENTS if stage == "unmask" else CLIENTS - 2
    assert len(aggregation.sent) == reports
    expected = aggregation.reports.protocol.decode(torch.from_numpy(sum(aggregation.sent)), reports)
    assert torch.equal(aggregation.moved, expected.float().double())


def test_a_sum_of_too_few_clients_is_not_unmasked_and_its_round_is_accounted():
    aggregation = Aggregation(
        {0: "collect_masked_vectors", 1: "share_keys", 2: "collect_masked_vectors"}
    )
    aggregation.run(2)
    assert not aggregation.moved.any()
    assert len(aggregation.ledger.accountant) == 2
    assert aggregation.ledger.epsilon().epsilon == opacus_shuffle.compute_epsilon(
        aggregation.reports.mechanism, steps=2, delta=1e-5
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"reconstruction_threshold": 4},
        {"modulus_range": 2**30},
        {"num_shares": 6},
        {"clipping_range": 1.0},
    ],
)
def test_clients_refuse_a_server_that_asks_for_other_settings(changed):
    sums = Aggregation().sums
    settings = {"num_shares": 1.0, "reconstruction_threshold": 5, "modulus_range": sums.modulus}
    scale = {
        "quantization_range": sums._levels,
        "clipping_range": sums._levels / 2,
        "max_weight": float(sums._levels),
    }
    workflow = SecAggPlusWorkflow(**{**settings, **scale, **changed})
    aggregation = Aggregation(workflow=workflow)
    aggregation.run()
    assert aggregation.sent == []
    assert not aggregation.moved.any()


def lying(stage, change):
    """A server that changes what it asks at one stage, by a function of what it would ask and of all nodes."""

    def tamper(asked, nodes):
        if asked["stage"] == stage:
            for name, value in change(asked, list(nodes)).items():
                asked[name] = value

    return tamper


def keys_of(count):
    """The server says that only so many clients shared their keys with one that did."""
    return lying(
        "collect_masked_vectors",
        lambda asked, _: {name: asked[name][: count - 1] for name in ("srcs", "ctxts")},
    )


@pytest.mark.parametrize(("count", "answers"), [(4, 0), (5, CLIENTS), (6, CLIENTS)])
def test_a_client_masks_its_counts_for_the_fewest_clients_that_it_agreed_to_and_not_for_one_less(
    count, answers
):
    aggregation = Aggregation(tamper=keys_of(count))
    aggregation.run()
    assert len(aggregation.sent) == answers


@pytest.mark.parametrize(("count", "answers"), [(4, 0), (5, 5), (6, 6)])
def test_a_client_helps_to_unmask_the_sum_of_the_fewest_and_not_of_one_less(count, answers):
    aggregation = Aggregation(
        {client: "collect_masked_vectors" for client in range(CLIENTS - count)}
    )
    aggregation.run()
    assert sum("shares" in record for record in aggregation.answers) == answers
    assert bool(aggregation.moved.any()) == (answers > 0)


@pytest.mark.parametrize("ones", ["none", "half", "all"])
@pytest.mark.parametrize("bits", [31, 32, 64])
def test_the_largest_sums_of_counts_decode_also_where_they_are_powers_of_two(ones, bits):
    """Every client sends the same count, the largest of which is a power of two itself; so are sums of eight of them."""
    aggregation = Aggregation(clients=8, bits=bits)
    count = {"none": 0, "half": bits // 2, "all": bits}[ones]
    aggregation.reports.randomize = lambda vector, generator: np.full(D, count, np.uint8).tobytes()
    aggregation.run()
    assert [each.tolist() for each in aggregation.sent] == [[count] * D] * 8
    expected = aggregation.reports.protocol.decode(torch.full((D,), 8 * count), 8)
    assert torch.equal(aggregation.moved, expected.float().double())


@pytest.mark.parametrize("largest", [None, 0.0, 1.0, 1e6])
@pytest.mark.parametrize("clients", [3, 8, 300])
def test_the_modulus_is_never_below_the_smallest_that_decodes(clients, largest):
    """Sums of counts from end to end of what is promised, from their residues; by default of all that there are."""
    reports = BitSums(**{**REPORTS, "num_users": clients, "min_reports": clients})
    modulus = SecureSums(reports, largest_coordinate=largest).modulus
    assert modulus >= smallest_modulus(reports.protocol, largest)
    middle, most = reports.protocol.expected_ones(clients), clients * reports.bits
    reach = (
        np.inf
        if largest is None
        else (largest + 6 * reports.protocol.variance**0.5) / reports.protocol.grid_step
    )
    ends = [np.ceil(max(0, middle - reach)), np.floor(min(most, middle + reach))]
    counts = torch.from_numpy(np.linspace(*ends, D).astype(np.int64))
    assert torch.equal(unwrapped(reports.protocol, counts % modulus, clients, modulus), counts)


@pytest.mark.parametrize(
    "tamper",
    [
        lying("unmask", lambda asked, nodes: {"active_nids": nodes, "dead_nids": nodes}),
        lying(
            "unmask", lambda asked, nodes: {"active_nids": nodes[:1] * 5, "dead_nids": nodes[1:]}
        ),
        lying("unmask", lambda asked, nodes: {"active_nids": nodes[:4], "dead_nids": nodes[4:]}),
        keys_of(4),
    ],
    ids=["everyone is both", "one client many times", "only a few", "keys of a few"],
)
def test_clients_help_to_unmask_nothing_but_the_sum_of_enough_of_them(tamper):
    """A server that gets both kinds of shares of one client, or all of one client's, reads that client's counts."""
    aggregation = Aggregation(tamper=tamper)
    aggregation.run()
    assert not any("shares" in record for record in aggregation.answers)
    assert not aggregation.moved.any()
    assert len(aggregation.ledger.accountant) == 1


def test_a_threshold_that_two_halves_of_the_clients_reach_is_refused():
    half = {**REPORTS, "num_users": 8, "min_reports": 4}
    with pytest.raises(ValueError, match="more than half must be there"):
        SecureSums(BitSums(**half))
    SecureSums(BitSums(**{**half, "min_reports": 5}))
    with pytest.raises(ValueError, match="and the dishonest ones besides"):
        SecureSums(BitSums(**{**half, "min_reports": 5, "honest_fraction": 0.75}))


@pytest.mark.parametrize(
    ("average", "reports", "named"),
    [
        ([np.full(D, np.nan)], 7, "average"),
        ([np.zeros(D + 1)], 7, "average"),
        ([np.full(D, 0.3)], 7, "average"),
        ([np.zeros(D)], 4, "num_reports"),
        ([np.zeros(D)], 8, "num_reports"),
    ],
)
def test_an_average_that_is_none_of_counts_is_refused(average, reports, named):
    aggregation = Aggregation()
    aggregation.ledger.open()
    with pytest.raises(ValueError, match=named):
        aggregation.sums.aggregated(
            [each * aggregation.sums._levels / 7 for each in average], reports
        )
    with pytest.raises(ValueError, match="no round is open"):
        Aggregation().sums.aggregated([np.zeros(D)], 7)


def test_a_ledger_with_other_settings_opens_no_round():
    other = BitSums(**{**REPORTS, "noise_multiplier": 0.5})
    with pytest.raises(ValueError, match="goes by other settings"):
        Ledger(other, Aggregation().sums, delta=1e-5).open()


def test_a_client_without_the_mod_sends_nothing():
    aggregation = Aggregation()
    context = Context(
        run_id=0, node_id=2, node_config={"partition-id": 0}, state=RecordDict(), run_config={}
    )
    client = SecureSumClient(
        aggregation.sums, context, lambda weights: weights, max_rounds=1, book=None
    )
    with pytest.raises(ValueError, match=r"mods=\[sums\.mod\]"):
        client.fit([np.zeros(D)], {"round": 1})


def test_no_round_begins_before_enough_nodes_are_there():
    """Two are there when the server asks for the first time, and all of them from the third time on."""
    aggregation, asked = Aggregation(), []
    nodes = aggregation.grid.get_node_ids

    def some_nodes():
        asked.append(len(aggregation.ledger.accountant))
        return nodes()[:2] if len(asked) < 3 else nodes()

    aggregation.grid.get_node_ids = some_nodes
    aggregation.run()
    assert not any(asked[:3])
    assert len(aggregation.sent) == CLIENTS
    assert len(aggregation.ledger.accountant) == 1


@pytest.mark.parametrize("limit", ["target_epsilon", "max_rounds"])
def test_when_the_target_or_what_clients_agreed_to_is_reached_nobody_answers_any_more(limit):
    price = opacus_shuffle.compute_epsilon(BitSums(**REPORTS).mechanism, steps=1, delta=1e-5)
    aggregation = Aggregation(**{limit: price if limit == "target_epsilon" else 1})
    aggregation.run(3)
    assert len(aggregation.ledger.accountant) == (1 if limit == "target_epsilon" else 3)
    assert len(aggregation.sent) == CLIENTS


def test_single_bits_and_gaussian_reports_are_no_counts():
    with pytest.raises(ValueError, match="messages='counts'"):
        SecureSums(BitSums(**REPORTS, messages="bits"))
    with pytest.raises(ValueError, match="format"):
        SecureSums(GaussianReports(dimension=2, max_norm=1.0, noise_multiplier=1.0, num_users=3))
