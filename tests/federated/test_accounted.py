"""What Flower's own differential privacy costs: run by Flower's code, accounted beside it.

Proofs: docs/proofs/14_noised_updates.md.
"""

import math

import numpy as np
import pytest
from scipy import stats

flwr = pytest.importorskip("flwr.app", reason="needs the extra federated")

from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod  # noqa: E402
from flwr.serverapp import strategy as flower  # noqa: E402
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords  # noqa: E402
from local_grid import LocalGrid  # noqa: E402

from opacus_shuffle.federated.flower import AccountedMod, AccountedStrategy  # noqa: E402

SIDES = {  # what the clients of each strategy need
    "ServerSideFixed": [],
    "ClientSideFixed": [fixedclipping_mod],
    "ServerSideAdaptive": [],
    "ClientSideAdaptive": [adaptiveclipping_mod],
}
NORM, DELTA, ZEROS = 0.5, 1e-3, np.zeros(3, np.float32)
ENTRIES, ERROR = 40_000, 4.5 / math.sqrt(2 * 40_000)
"""Noise of so many entries shows its deviation up to a standard error of 1/√(2·40,000)."""
LONGEST = 1.001
"""Of the clipping norm: what an update counts as, as arithmetic in single precision may err."""
WAYS = {"fraction_evaluate": 0.0, "min_train_nodes": 1, "min_available_nodes": 1}


class AsksTwice(flower.FedAvg):
    def configure_train(self, *asked):
        return [*super().configure_train(*asked)] * 2


class Run:
    """Clients in this process, and one of Flower's strategies with its account.

    Args:
        side: Which strategy.
        update: What a client adds to every entry, before it is clipped; or a row for each client.
        weights: Of the clients, all of whom are asked.
        inner: What the strategy wraps.
        mods: The clients' mods, by default those that the strategy needs.
        stock: Changes of the strategy's settings.
        options: Of the account.
    """

    def __init__(
        self,
        side="ServerSideFixed",
        *,
        update=1.0,
        weights=(10, 10, 10, 10),
        inner=None,
        mods=None,
        stock=(),
        **options,
    ):
        app, self.trained = ClientApp(mods=SIDES[side] if mods is None else mods), []

        @app.train()
        def train(message, context):
            self.trained.append(context.node_config["partition-id"])
            old = message.content["arrays"]["weights"].numpy()
            moved = update[self.trained[-1]] if np.ndim(update) == 2 else update
            arrays = ArrayRecord({"weights": Array((old + moved).astype(old.dtype))})
            metrics = MetricRecord({"num-examples": weights[self.trained[-1]]})
            return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

        own = ({"clipping_norm": NORM}, {"initial_clipping_norm": NORM, "clipped_count_stddev": 1})
        settings = {"noise_multiplier": 1.9, "num_sampled_clients": 4, **own["Adaptive" in side]}
        self.stock = getattr(flower, f"DifferentialPrivacy{side}Clipping")(
            inner or flower.FedAvg(**WAYS), **{**settings, **dict(stock)}
        )
        account = {"num_clients": len(weights), "delta": DELTA, **options}
        self.grid = LocalGrid(app, len(weights))
        self.strategy = AccountedStrategy(self.stock, **account)

    def start(self, rounds, model=ZEROS):
        """The last model that was released; None if there is none."""
        record = ArrayRecord({"weights": Array(model)})
        result = self.strategy.start(grid=self.grid, initial_arrays=record, num_rounds=rounds)
        return result.arrays["weights"].numpy() if len(result.arrays) else None

    def counts(self, rounds):
        """The noisy shares of clipped clients in so many rounds, each at the first norm."""
        shares, sent = [], ArrayRecord({"weights": Array(ZEROS)})
        asked = self.strategy.configure_train(1, sent, flwr.ConfigRecord(), self.grid)
        for _ in range(rounds):
            self.strategy.aggregate_train(1, self.grid.send_and_receive(asked))
            shares.append(0.5 - math.log(self.stock.clipping_norm / NORM) / self.stock.clip_norm_lr)
            self.stock.clipping_norm = NORM
        return np.array(shares)


def delta_of(mu, epsilon):
    """The curve of the Gaussian mechanism (Balle and Wang 2018, Theorem 8)."""
    first, second = stats.norm.cdf([mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu])
    return first - math.exp(epsilon) * second


@pytest.mark.parametrize("moved", [1, 2])
@pytest.mark.parametrize(
    "weights",
    [(10, 20, 40, 30), *(pytest.param(w, marks=pytest.mark.zoo) for w in ((10,) * 4, (7,)))],
)
@pytest.mark.parametrize("side", ["ServerSideFixed", "ClientSideFixed"])
def test_fixed_clipping_costs_what_the_largest_weight_of_the_mean_does(side, weights, moved):
    run = Run(side, weights=weights, adjacency={1: "zero_out", 2: "replace"}[moved])
    run.start(3)
    mu = math.sqrt(3) * moved * max(weights) / sum(weights) / (1.9 / 4) * LONGEST
    assert delta_of(mu, run.strategy.report().best.epsilon) == pytest.approx(DELTA, rel=1e-5)


@pytest.mark.parametrize("side", SIDES)
def test_the_noise_that_flower_adds_is_no_less_than_what_is_accounted(side):
    run = Run(side)
    noise = run.start(1, np.zeros(ENTRIES)) - NORM / math.sqrt(ENTRIES)
    ((one, _),) = run.strategy.accountant.rounds
    added = run.stock.noise_multiplier * run.stock.clipping_norm / NORM
    assert noise.std() / NORM * 4 == pytest.approx(added, rel=ERROR)
    assert one.noise_multiplier <= added


def test_adaptive_clipping_is_accounted_with_the_count_that_it_releases():
    many = {"num_sampled_clients": 1000, "clipped_count_stddev": None}  # Flower takes 1000/20
    assert Run("ServerSideAdaptive", num_clients=2000, stock=many).stock.clipped_count_stddev == 50
    run = Run("ServerSideAdaptive", weights=(1,), stock={"num_sampled_clients": 1})
    shares = run.counts(200)  # in all of which the client is clipped
    assert np.std(shares) == pytest.approx(1.0, abs=4.5 / math.sqrt(400))
    assert np.mean(shares) == pytest.approx(1.0, abs=4.5 / math.sqrt(200))
    least = math.exp(-0.2 * (1 + 5 - 0.5)) * (1.9**-2 - 0.25) ** -0.5
    mu = math.sqrt(200 * ((LONGEST / least) ** 2 + 1))
    assert delta_of(mu, run.strategy.report().best.epsilon) == pytest.approx(DELTA, rel=1e-5)


def test_a_run_stops_at_its_budget_and_releases_no_round_that_would_leave_it():
    once = Run()
    once.start(3)
    budget = once.strategy.report().best.epsilon
    many = Run(target_epsilon=budget)
    unequal = Run(target_epsilon=budget, weights=(9, 0.1, 0.1, 0.1))
    many.start(5)
    assert (len(many.trained), len(many.strategy.accountant)) == (4 * 3, 3)
    assert (unequal.start(1), len(unequal.strategy.accountant)) == (None, 0)


def test_the_report_says_whom_it_trusts_what_is_no_cipher_and_what_other_trust_would_cost():
    run, own = Run(num_clients=40), np.random.get_bit_generator()
    run.start(2)
    report = run.strategy.report()
    bits = {bound.bound: bound.epsilon for bound in report.bounds}["sums_of_bits"]
    assert bits < report.best.epsilon  # by secret coins
    words = ("trusting the server alone", "no metrics", "one client's update is", "NumPy")
    assert all(said in report.statement() for said in words)
    np.random.set_bit_generator(np.random.MT19937())
    assert not run.strategy.report().predictable
    np.random.seed(0)  # noqa: NPY002
    assert "This run is not private" in run.strategy.report().statement()
    np.random.set_bit_generator(own)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"inner": flower.FedAdam()}, "averages as FedAvg does, got FedAdam"),
        ({"stock": {"noise_multiplier": 0.0}}, "noise_multiplier must be positive"),
        ({"inner": AsksTwice(**WAYS), "num_clients": 8}, "a client answered twice"),
        ({"num_clients": 3}, "num_clients must be a whole number of at least 4"),
        ({"weights": (10, 10, 0, 10)}, "num-examples of a client must be positive"),
        ({"side": "ClientSideFixed", "mods": []}, "above the clipping norm 0.5: install"),
        ({"update": [1.0, math.nan, 1.0]}, "update of norm nan"),
        ({"model": np.float32(1.0)}, "'weights' must have a dimension"),
        ({"model": np.zeros(3, np.float16)}, "float32 or float64 entries"),
    ],
)
def test_what_breaks_the_account_is_refused(changes, words):
    model = np.asarray(changes.pop("model", ZEROS))
    with pytest.raises(ValueError, match=words):
        Run(**changes).start(1, model)


def test_local_noise_is_accounted_as_it_is_for_the_rounds_that_were_agreed_to():
    stock = LocalDpMod(clipping_norm=NORM, sensitivity=1.5, epsilon=4.0, delta=1e-5)
    mod = AccountedMod(stock, num_clients=100, delta=DELTA, max_rounds=3, book=None)
    best, sigma = mod.report().best, mod.round.noise_multiplier
    assert delta_of(math.sqrt(3) / sigma, best.epsilon) == pytest.approx(DELTA, rel=1e-5)
    assert (best.trusted, best.rounds) == ("nobody", 3)

    def sent(rounds, model=ZEROS, **options):
        run = Run(mods=[mod], weights=(1,), **options)
        run.strategy = flower.FedAvg(**WAYS)
        return run.start(rounds, np.asarray(model)), len(run.trained)

    noise = sent(1, np.zeros(ENTRIES))[0] - NORM / math.sqrt(ENTRIES)
    assert noise.std() / NORM == pytest.approx(sigma, rel=ERROR)
    assert sent(5)[1] == 3
    assert sent(1, np.float32(1.0)) == (None, 0)  # Flower would add no noise to it
    assert sent(1, update=[1.0, math.nan, 1.0]) == (None, 1)  # nor clip this
    assert sent(1, np.full(3, 1e6, np.float32)) == (None, 0)  # an update would be rounded up

    class Loud(LocalDpMod):
        pass

    with pytest.raises(ValueError, match="mod must be a LocalDpMod and not of a subclass"):
        AccountedMod(Loud(1.0, 1.0, 1.0, 1e-5), num_clients=1, delta=DELTA, max_rounds=1, book=None)


def test_one_client_moves_the_mean_by_no_more_than_is_accounted_whatever_is_rounded():
    clients, size, norm, means = 100, 1000, 0.05, []
    trained = np.linspace(0.001, 0.009, clients)[:, None] * np.ones((1, size))

    def mean(contents, key):
        found = aggregate_arrayrecords(contents, key)["weights"].numpy()
        means.append(found.astype(np.float64))
        return MetricRecord({})

    for trained[0] in (2e-6, 1.0):  # Flower divides by the norm of an update of zero
        inner = flower.FedAvg(**WAYS, train_metrics_aggr_fn=mean)
        stock = {"num_sampled_clients": clients, "clipping_norm": norm}
        run = Run(update=trained, weights=(7,) * clients, inner=inner, stock=stock)
        assert run.start(1, np.linspace(5, 15, size, dtype=np.float32)).dtype == np.float32
    ((one, _),) = run.strategy.accountant.rounds
    moved = np.linalg.norm(means[1] - means[0]) * clients / norm
    assert 0.99 <= moved <= 1.9 / one.noise_multiplier


def test_the_number_of_clipped_clients_is_handed_on_with_its_noise_alone():
    run = Run("ClientSideAdaptive")
    asked = run.strategy.configure_train(
        1, ArrayRecord({"weights": Array(ZEROS)}), flwr.ConfigRecord(), run.grid
    )
    assert not run.strategy.aggregate_train(1, run.grid.send_and_receive(asked))[1]
    # Where a round fails after the next norm was found, that norm is accounted.
    failing = Run("ServerSideAdaptive", update=[1.0, math.nan, 1.0])
    with pytest.raises(ValueError, match="update of norm nan"):
        failing.start(1)
    assert failing.stock.clipping_norm != NORM
    assert len(failing.strategy.accountant) == 1


@pytest.mark.parametrize(("drawn", "released"), [(8.99, True), (9.01, False)])
def test_a_round_whose_norm_falls_faster_than_is_accounted_is_not_released(
    drawn, released, monkeypatch
):
    """Four clients' count is accounted up to 4 + 5 deviations of its noise, each of 1."""

    def normal(mean, deviation, size=None):
        return drawn if size is None else np.zeros(size)

    monkeypatch.setattr(np.random, "normal", normal)
    run = Run("ServerSideAdaptive")
    assert (run.start(1) is not None) == released
    assert (run.stock.clipping_norm < NORM) == released
    assert len(run.strategy.accountant) == 1
