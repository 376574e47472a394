"""The optimisers against scipy where the protocol is silent, against their bounds where it is not."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from opacus_shuffle.accountants.bounds.registry import Guarantee
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum
from opacus_shuffle.sco import problem as problem_module
from opacus_shuffle.sco.accelerated import shuffle_accelerated_sgd
from opacus_shuffle.sco.constraints import Box, L2Ball
from opacus_shuffle.sco.gradient_descent import shuffle_gradient_descent
from opacus_shuffle.sco.losses import absolute_loss, logistic_loss
from opacus_shuffle.sco.moreau import MoreauEnvelope
from opacus_shuffle.sco.objective import Objective, take
from opacus_shuffle.sco.result import History
from opacus_shuffle.sco.sgd import shuffle_sgd
from opacus_shuffle.sco.strongly_convex import number_of_phases, shuffle_strongly_convex

BUDGET = {"epsilon": 1.0, "delta": 1e-6}
OPTIMISERS = (shuffle_sgd, shuffle_accelerated_sgd, shuffle_gradient_descent)
# A mean of N independent terms lies within this many standard errors but for 6e-5 (the seeds are fixed).
ERRORS = 4


def half_square(theta, batch):
    return (batch - theta).square().sum(1) / 2


def norm_loss(theta, batch):
    return (batch - theta).norm(dim=1)


class Quadratic(Objective):
    """``half_square`` by hand, for the sake of speed."""

    def __init__(self, dimension):
        self.dimension = dimension

    def _evaluate(self, theta, batch):
        return half_square(theta, batch), theta - batch


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def silent(monkeypatch):
    """A protocol that answers the sum itself, and has no variance."""

    def exact(self, rows, generator=None):
        return sum(block.sum(0) for block in ([rows] if isinstance(rows, torch.Tensor) else rows))

    monkeypatch.setattr(ShuffleVectorSum, "simulate", exact)
    monkeypatch.setattr(ShuffleVectorSum, "variance", property(lambda self: 1e-30))


def logistic_data(users, seed=0):
    features = torch.randn(users, 3, generator=seeded(seed), dtype=torch.float64)
    features = features / features.norm(dim=1, keepdim=True)
    labels = torch.where(features[:, 0] + 0.3 * torch.randn(users, generator=seeded(seed + 1)) > 0, 1.0, -1.0)
    return features, labels.to(torch.float64)


def best_in_ball(loss, data, dimension, radius):
    """The mean loss's least value in a ball about 0, and where, by scipy."""

    def value(point):
        theta = torch.tensor(point, requires_grad=True)
        mean = loss(theta, data).mean()
        (gradient,) = torch.autograd.grad(mean, theta)
        return float(mean.detach()), gradient.numpy()

    ball = {"type": "ineq", "fun": lambda x: radius**2 - x @ x, "jac": lambda x: -2 * x}
    found = minimize(value, np.zeros(dimension), jac=True, constraints=[ball], method="SLSQP", options={"ftol": 1e-14})
    return found.fun, torch.tensor(found.x)


# ---- without noise ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("radius", [0.5, 50.0])
def test_gradient_descent_finds_the_minimiser_without_noise(silent, radius):
    data = logistic_data(200)
    least, where = best_in_ball(logistic_loss, data, 3, radius)
    estimate = shuffle_gradient_descent(
        logistic_loss, data, constraint=L2Ball(radius), lipschitz=1.0, smoothness=0.25, dimension=3, rounds=3000,
        step_size=4.0, average=False, **BUDGET
    )  # fmt: skip
    assert float(logistic_loss(estimate.theta, data).mean()) <= least + 1e-7
    assert torch.allclose(estimate.theta, where, atol=2e-3)


@pytest.mark.parametrize("radius", [0.5, 5.0])
def test_accelerated_sgd_finds_the_minimiser_without_noise(silent, radius):
    base = logistic_data(40)
    data = tuple(part.repeat(300, *[1] * (part.ndim - 1)) for part in base)
    batches = torch.arange(40 * 300).split(40)  # every batch is the whole of the base: no sampling error
    least, _ = best_in_ball(logistic_loss, base, 3, radius)
    options = {"constraint": L2Ball(radius), "lipschitz": 1.0, "smoothness": 0.25, "dimension": 3, "batches": batches}
    steps = [0.5 / (t + 1) for t in range(1, 301)]  # as for no sampling error: 2β/(t+1)
    estimate = shuffle_accelerated_sgd(logistic_loss, data, inverse_step_sizes=steps, **options, **BUDGET)
    proved = 2 / (301 * 302) * (radius + 0.25 * radius**2)
    assert -1e-9 <= float(logistic_loss(estimate.theta, base).mean()) - least <= proved


def test_sgd_finds_the_minimiser_without_noise(silent):
    base = torch.randn(20, 2, generator=seeded(0), dtype=torch.float64)
    data = base.repeat(500, 1)
    least, _ = best_in_ball(norm_loss, base, 2, 1.0)
    estimate = shuffle_sgd(
        norm_loss, data, constraint=L2Ball(1.0), lipschitz=1.0, dimension=2, batches=torch.arange(10_000).split(20), **BUDGET
    )
    assert -1e-9 <= float(norm_loss(estimate.theta, base).mean()) - least <= estimate.excess_loss_bound
    assert estimate.excess_loss_bound == pytest.approx(1 / math.sqrt(500), rel=1e-6)


@pytest.mark.parametrize("run", OPTIMISERS)
def test_the_first_step_goes_downhill(silent, run):
    data = torch.full((10, 2), 0.5, dtype=torch.float64)
    options = {} if run is shuffle_sgd else {"smoothness": 1.0}
    size = {"rounds": 2, "step_size": 0.1, "average": False} if run is shuffle_gradient_descent else {"batch_size": 5}
    size = {**size, "step_size": 0.1, "average": False} if run is shuffle_sgd else size
    size = {**size, "inverse_step_sizes": [10.0, 10.0]} if run is shuffle_accelerated_sgd else size
    estimate = run(half_square, data, constraint=L2Ball(5.0), lipschitz=10.0, dimension=2, **options, **size, **BUDGET)
    after_one = 0.05  # 0 − 0.1·(0 − 0.5)
    scale = accelerated = 1.0
    if run is shuffle_accelerated_sgd:
        accelerated = 2 / 3  # the aggregate: α_1 = 2/3 of the way from the start
    assert torch.allclose(estimate.history[0].theta, torch.full((2,), after_one * scale * accelerated, dtype=torch.float64))


def test_smoothed_runs_find_the_kink_without_noise(silent):
    """The median by the absolute loss, with the exact envelope of a linear model and with the generic solver."""
    targets = torch.tensor([-0.9, 0.2, 0.3, 0.8, 0.25], dtype=torch.float64)
    features = torch.ones(5, 1, dtype=torch.float64)

    def rough(theta, batch):
        return (batch - theta).abs().sum(1)

    options = {"constraint": L2Ball(1.0), "lipschitz": 1.0, "dimension": 1, **BUDGET}
    exact = shuffle_gradient_descent(absolute_loss, (features, targets), rounds=400, average=False, **options)
    assert float(exact.theta) == pytest.approx(0.25, abs=1 / exact.parameters["smoothness"] + 0.01)
    generic = shuffle_gradient_descent(rough, targets[:, None], rounds=400, average=False, **options)
    # gradients wrong by 2 %, of a loss whose one-sided slopes at the median are 1/5
    assert float(generic.theta) == pytest.approx(0.25, abs=1 / generic.parameters["smoothness"] + 0.01)


# ---- with noise -------------------------------------------------------------------------------------------------------------


def population_excess(theta, mean):
    """Of E‖X − θ‖²/2."""
    return float((theta - mean).square().sum()) / 2


def runs(run, seeds, users=3000, **options):
    """Excess population losses over fresh users and fresh noise, and the bound."""
    mean, excesses, bound = torch.tensor([0.4, -0.3, 0.2], dtype=torch.float64), [], None
    for seed in range(seeds):
        data = mean + 0.2 * (2 * torch.rand(users, 3, generator=seeded(seed), dtype=torch.float64) - 1)
        common = {"constraint": L2Ball(1.0), "lipschitz": 1.8, "generator": seeded(1000 + seed), **BUDGET}
        estimate = run(Quadratic(3), data, **common, **options)
        excesses.append(population_excess(estimate.theta, mean))
        bound = estimate.excess_loss_bound
    return np.array(excesses), bound


@pytest.mark.parametrize(
    ("run", "options"),
    [
        (shuffle_sgd, {}),
        (shuffle_sgd, {"step_size": 0.3}),
        (shuffle_sgd, {"parameters": "printed"}),
        (shuffle_accelerated_sgd, {"smoothness": 1.0}),
        (shuffle_accelerated_sgd, {"smoothness": 1.0, "honest_fraction": 0.5}),
        (shuffle_accelerated_sgd, {"smoothness": 1.0, "batch_size": 100}),
        (shuffle_gradient_descent, {"smoothness": 1.0, "rounds": 50}),
        (shuffle_gradient_descent, {"smoothness": 1.0, "parameters": "printed", "rounds": 50}),
        (shuffle_strongly_convex, {"smoothness": 1.0, "strong_convexity": 1.0}),
        (shuffle_strongly_convex, {"smoothness": 1.0, "strong_convexity": 1.0, "method": "gradient_descent", "rounds": 20}),
        (shuffle_strongly_convex, {"smoothness": 1.0, "strong_convexity": 1.0, "method": "pan_private"}),
    ],
)
def test_the_mean_excess_is_below_the_bound(run, options):
    excesses, bound = runs(run, 12, **options)
    assert excesses.mean() - ERRORS * excesses.std() / math.sqrt(12) <= bound
    assert bound < 1.8 * 2  # and says more than L·diameter


def test_no_bound_exceeds_what_the_lipschitz_constant_says():
    options = {"constraint": L2Ball(1.0), "lipschitz": 1.8, "batch_size": 30, "calibration": "published", **BUDGET}
    for run, more in [(shuffle_sgd, {}), (shuffle_accelerated_sgd, {"smoothness": 1.0})]:
        assert run(Quadratic(3), torch.zeros(60, 3), **more, **options).excess_loss_bound == 1.8 * 2


def test_the_mean_excess_is_below_the_bound_where_the_loss_is_smoothed():
    """Medians: E|X − θ| for X uniform on [0.1, 0.7] has its minimum at 0.4; there it exceeds it by (θ − 0.4)²/0.6."""
    for run, options in [(shuffle_accelerated_sgd, {}), (shuffle_gradient_descent, {"rounds": 30})]:
        excesses = []
        for seed in range(12):
            targets = 0.1 + 0.6 * torch.rand(2000, generator=seeded(seed), dtype=torch.float64)
            data = torch.ones(2000, 1, dtype=torch.float64), targets
            estimate = run(
                absolute_loss, data, constraint=Box(-1.0, 1.0, dimension=1), lipschitz=1.0, generator=seeded(seed), **BUDGET,
                **options
            )  # fmt: skip
            theta = float(estimate.theta)
            inside = (theta - 0.4) ** 2 / 0.6
            excesses.append(inside if 0.1 <= theta <= 0.7 else abs(theta - 0.4) - 0.15)
        deviation = np.std(excesses) / math.sqrt(12)
        assert np.mean(excesses) - ERRORS * deviation <= estimate.excess_loss_bound < 1.0


def test_acceleration_beats_plain_sgd_on_a_smooth_loss():
    plain, plain_bound = runs(shuffle_sgd, 40)
    fast, fast_bound = runs(shuffle_accelerated_sgd, 40, smoothness=1.0)
    assert fast_bound < plain_bound
    error = math.sqrt((plain.var() + fast.var()) / 40)
    assert plain.mean() - fast.mean() > ERRORS * error


def test_phases_beat_one_phase_on_a_strongly_convex_loss():
    options = {"smoothness": 1.0, "strong_convexity": 1.0, "users": 20_000}
    _, single = runs(shuffle_strongly_convex, 1, phases=1, **options)
    _, double = runs(shuffle_strongly_convex, 1, phases=2, **options)
    _, default = runs(shuffle_strongly_convex, 1, **options)
    assert default < double < single / 2


def test_phases_end_nearer_where_steps_must_suit_the_distance():
    options = {"smoothness": 1.0, "strong_convexity": 1.0, "users": 5000, "method": "gradient_descent", "rounds": 20}
    single, single_bound = runs(shuffle_strongly_convex, 8, phases=1, **options)
    several, several_bound = runs(shuffle_strongly_convex, 8, phases=4, **options)
    assert several_bound < single_bound
    error = math.sqrt((single.var() + several.var()) / 8)
    assert single.mean() - several.mean() > ERRORS * error


def test_the_default_number_of_phases_is_log_log():
    assert [number_of_phases(n) for n in (1, 2, 4, 16, 17, 256, 257, 65_536, 65_537)] == [1, 1, 1, 2, 3, 3, 4, 4, 5]


# ---- what is said about privacy ---------------------------------------------------------------------------------------------


def test_statements_say_what_the_protocols_do():
    data = torch.zeros(1000, 2, dtype=torch.float64)
    options = {"constraint": L2Ball(1.0), "lipschitz": 1.0, "dimension": 2, "honest_fraction": 0.8, **BUDGET}
    estimate = shuffle_sgd(half_square, data, batch_size=300, **options)
    protocol = ShuffleVectorSum(300, 2, 1.0, 1.0, 1e-6, "tight", honest_fraction=0.8)
    assert estimate.privacy == protocol.statement(rounds=3, num_users=900, interaction="sequential")
    assert estimate.privacy.guarantee is Guarantee.PROVED
    options["epsilon"] = 0.5
    full = shuffle_gradient_descent(half_square, data, smoothness=1.0, rounds=5, calibration="published", **options)
    protocol = ShuffleVectorSum(1000, 2, 1.0, 0.5, 1e-6, rounds=5, calibration="published", honest_fraction=0.8)
    assert full.privacy == protocol.statement(interaction="full")
    phases = shuffle_strongly_convex(
        half_square, data, smoothness=1.0, strong_convexity=1.0, method="gradient_descent", phases=2, rounds=5, **options
    )
    protocol = ShuffleVectorSum(500, 2, 1.0, 0.5, 1e-6, rounds=5, calibration="tight", honest_fraction=0.8)
    assert phases.privacy == dataclasses.replace(protocol.statement(interaction="full"), rounds=10, num_users=1000)


def test_nothing_but_the_estimate_and_its_history_depends_on_the_data():
    first, second = (
        shuffle_accelerated_sgd(
            half_square, x * torch.ones(500, 2, dtype=torch.float64), constraint=L2Ball(1.0), lipschitz=1.0, clip=True,
            smoothness=1.0, dimension=2, **BUDGET
        )
        for x in (0.0, 50.0)
    )  # fmt: skip
    assert first.parameters == second.parameters
    assert first.privacy == second.privacy
    assert first.excess_loss_bound == second.excess_loss_bound


@pytest.mark.parametrize("run", OPTIMISERS)
def test_runs_repeat_with_the_same_generator_and_ignore_the_global_one(run):
    data = torch.randn(400, 2, generator=seeded(0), dtype=torch.float64)
    extra = {"rounds": 3} if run is shuffle_gradient_descent else {"batch_size": 80}
    extra = extra if run is shuffle_sgd else {**extra, "smoothness": 1.0}
    options = {"constraint": L2Ball(1.0), "lipschitz": 1.0, "dimension": 2, "clip": True, **extra, **BUDGET}
    torch.manual_seed(0)
    first = run(half_square, data, generator=seeded(5), **options)
    torch.manual_seed(1)
    second = run(half_square, data, generator=seeded(5), **options)
    assert torch.equal(first.theta, second.theta)
    torch.manual_seed(0)
    secret = run(half_square, data, **options)
    torch.manual_seed(0)
    assert not torch.equal(secret.theta, run(half_square, data, **options).theta)


# ---- losses, gradients, errors ----------------------------------------------------------------------------------------------


def test_long_gradients_are_refused_or_cut(silent):
    data = torch.tensor([[3.0, 4.0]], dtype=torch.float64).repeat(4, 1)
    options = {"constraint": L2Ball(10.0), "dimension": 2, "batch_size": 4, "average": False, "step_size": 1.0, **BUDGET}
    with pytest.raises(ValueError, match=r"lipschitz must bound .* got 2 and a gradient of norm 5: pass a larger"):
        shuffle_sgd(half_square, data, lipschitz=2.0, **options)
    cut = shuffle_sgd(half_square, data, lipschitz=2.0, clip=True, **options)
    assert torch.allclose(cut.theta, torch.tensor([1.2, 1.6], dtype=torch.float64))
    whole = shuffle_sgd(half_square, data, lipschitz=5.0 * (1 - 5e-6), **options)  # rounding is forgiven, and scaled back
    assert float(whole.theta.norm()) == pytest.approx(5.0 * (1 - 5e-6))


def unusable():
    """Objectives for which some records are unusable, these records, and data."""
    data = torch.randn(9, 2, generator=seeded(3), dtype=torch.float64)

    def picky(theta, batch):
        return (batch - theta).square().sum(1) / (1 if batch.isfinite().all() else float("nan"))

    def steep(theta, batch):
        return (batch - theta).abs().sum(1) * (1 + batch.abs().max() // 50)

    def raising(theta, batch):
        if float(batch.abs().max()) > 50:
            raise RuntimeError("too large")
        return (batch - theta).square().sum(1)

    general = Objective.from_loss(steep, dimension=2)
    return {
        "not finite": (Objective.from_loss(half_square, dimension=2), data, math.nan),
        "branching": (Objective.from_loss(picky, dimension=2), data, math.inf),
        "raising": (Objective.from_loss(raising, dimension=2), data, 99.0),
        "steeper than told": (MoreauEnvelope(general, 1.0, lipschitz=2.0), data, 99.0),
        "no label": (Objective.from_loss(logistic_loss, dimension=2), (data, torch.ones(9)), 0.0),
    }


@pytest.mark.filterwarnings("ignore:loss cannot be vectorised")
@pytest.mark.parametrize("case", unusable())
def test_unusable_records_report_zero_where_long_gradients_are_cut_and_change_nothing_else(case):
    objective, data, value = unusable()[case]
    theta = torch.tensor([0.1, 0.2], dtype=torch.float64)

    def spoilt(records):
        if isinstance(data, tuple):
            labels = data[1].clone()
            labels[records] = value
            return data[0], labels
        changed = data.clone()
        changed[records] = value
        return changed

    refuse, cut = (problem_module.Reports(objective, 2.0, clip) for clip in (False, True))
    clean = cut.rows(theta, data)
    for records in ([0], [4, 8], list(range(1, 9))):
        with pytest.raises((ValueError, RuntimeError)):
            refuse.rows(theta, spoilt(records))
        rows = cut.rows(theta, spoilt(records))
        others = [i for i in range(9) if i not in records]
        assert torch.equal(rows[others], clean[others])
        assert float(rows[records].abs().max()) == 0
        alone = cut.rows(theta, take(spoilt(records), records[:1]))
        assert alone.shape == (1, 2)
        assert float(alone.abs().max()) == 0
    with pytest.raises((ValueError, RuntimeError)):
        cut.rows(theta, spoilt(list(range(9))))


def test_mistakes_in_the_call_are_refused_even_where_long_gradients_are_cut(silent):
    options = {"constraint": L2Ball(1.0), "lipschitz": 2.0, "dimension": 2, "clip": True, **BUDGET}
    for batch_size in (1, 5):
        with pytest.raises(ValueError, match=r"x must be a floating-point tensor of shape \(B, 2\)"):
            shuffle_sgd(absolute_loss, (torch.zeros(20, 3), torch.zeros(20)), batch_size=batch_size, **options)


def test_gradients_come_in_blocks_where_they_are_many(silent, monkeypatch):
    data = torch.randn(100, 2, generator=seeded(0), dtype=torch.float64)
    options = {"constraint": L2Ball(1.0), "lipschitz": 9.0, "smoothness": 1.0, "dimension": 2, "rounds": 4, **BUDGET}
    whole = shuffle_gradient_descent(half_square, data, **options)
    monkeypatch.setattr(problem_module, "_BLOCK", 14)
    assert torch.allclose(shuffle_gradient_descent(half_square, data, **options).theta, whole.theta)


def test_the_real_protocol_takes_blocks(monkeypatch):
    data = torch.randn(100, 2, generator=seeded(0), dtype=torch.float64)
    monkeypatch.setattr(problem_module, "_BLOCK", 14)
    options = {"constraint": L2Ball(1.0), "lipschitz": 9.0, "smoothness": 1.0, "dimension": 2, "rounds": 2, **BUDGET}
    assert bool(shuffle_gradient_descent(half_square, data, **options).theta.isfinite().all())


def test_modules_and_envelopes_are_losses_too():
    features, labels = logistic_data(300)
    module = torch.nn.Linear(3, 1, bias=False).double()

    def criterion(outputs, targets):
        return torch.nn.functional.softplus(-targets * outputs.squeeze(-1)).mean()

    options = {"constraint": L2Ball(5.0), "lipschitz": 1.0, "generator": seeded(0), **BUDGET}
    from_module = shuffle_sgd((module, criterion), (features, labels), initial=torch.zeros(3), batch_size=100, **options)
    options["generator"] = seeded(0)
    from_loss = shuffle_sgd(logistic_loss, (features, labels), initial=torch.zeros(3), batch_size=100, **options)
    assert torch.allclose(from_module.theta, from_loss.theta)
    start = shuffle_sgd((module, criterion), (features, labels), batch_size=300, **options).theta  # one round: θ_0 is the mean
    assert torch.allclose(start, module.weight.detach().flatten())
    envelope = MoreauEnvelope.generalized_linear("absolute", 3.0, dimension=3, lipschitz=1.0)
    own = shuffle_accelerated_sgd(envelope, (features, labels), batch_size=100, **options)
    assert own.parameters["smoothness"] == 3.0
    made = shuffle_accelerated_sgd(
        absolute_loss, (features, labels), initial=torch.zeros(3), batch_size=100,
        envelope=lambda beta: MoreauEnvelope.generalized_linear("absolute", beta, dimension=3), **options
    )  # fmt: skip
    assert made.excess_loss_bound > 1 / (2 * made.parameters["smoothness"])  # the price of smoothing is in it


def test_a_known_distance_improves_the_bound_and_a_callable_needs_one():
    data, project = torch.zeros(300, 2, dtype=torch.float64), L2Ball(4.0).project
    options = {"lipschitz": 5.0, "dimension": 2, "batch_size": 50, **BUDGET}
    bounds = [
        shuffle_sgd(half_square, data, constraint=constraint, **more, **options).excess_loss_bound
        for constraint, more in [
            (L2Ball(4.0), {"diameter": 0.5}),
            (L2Ball(4.0), {}),
            (project, {"diameter": 8.0}),
            (L2Ball(4.0), {"initial": torch.tensor([2.0, 0.0])}),
        ]
    ]
    assert [bound / bounds[0] for bound in bounds] == pytest.approx([1, 8, 16, 12])
    with pytest.raises(ValueError, match="diameter must be given"):
        shuffle_sgd(half_square, data, constraint=project, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 16.0}, "epsilon must not exceed 15"),
        ({"delta": 0.5}, "delta must be below 1/2"),
        ({"honest_fraction": 0.2}, r"honest_fraction must lie in \[1/3, 1\]"),
        ({"calibration": "loose"}, "calibration must be one of"),
        ({"parameters": "own"}, "parameters must be one of"),
        ({"lipschitz": 0.0}, "lipschitz must be positive"),
        ({"smoothness": -1.0}, "smoothness must be positive"),
        ({"constraint": None}, "constraint"),
        ({"dimension": None}, "dimension must be given"),
        ({"initial": torch.zeros(3)}, r"initial must have shape \(2,\), got \(3,\)"),
        ({"initial": torch.tensor([0.0, math.nan])}, "initial must hold 2 finite numbers, got NaN or infinity in it"),
        ({"initial": "here"}, "initial must be a tensor of 2 real numbers, got str"),
        ({"initial": torch.zeros(2, dtype=torch.complex64)}, "initial must hold 2 real numbers, got type torch.complex64"),
        ({"batches": 3, "batch_size": None}, "batches must be a list of vectors of user numbers, got 3"),
        ({"inverse_step_sizes": 3}, "inverse_step_sizes must be a sequence of positive numbers, got 3"),
        ({"envelope": 3, "smoothness": None}, "envelope must be a function from a smoothness to a MoreauEnvelope, got 3"),
        (
            {"envelope": lambda beta: None, "smoothness": None},
            "envelope must return a MoreauEnvelope of dimension 2, got NoneT",
        ),
        (
            {"envelope": lambda b: MoreauEnvelope.generalized_linear("hinge", b, dimension=3), "smoothness": None},
            "envelope must return a MoreauEnvelope of dimension 2, got one of dimension 3",
        ),
        ({"clip": 1}, "clip must be True or False"),
        ({"generator": 0}, "generator must be a Generator"),
        ({"inverse_step_sizes": [1.0]}, "one L_t for each of the 2 rounds, got 1"),
        ({"inverse_step_sizes": [1.0, 0.0]}, "inverse_step_sizes must be positive"),
        ({"envelope": lambda beta: None}, "envelope must be left out"),
    ],
)
def test_nonsense_is_refused(change, message):
    options = {"constraint": L2Ball(1.0), "lipschitz": 2.0, "smoothness": 1.0, "dimension": 2, "batch_size": 10, **BUDGET}
    with pytest.raises(ValueError, match=message):
        shuffle_accelerated_sgd(half_square, torch.zeros(20, 2), **{**options, **change})


def test_gradient_descent_wants_a_flag_for_its_average():
    with pytest.raises(ValueError, match="average must be True or False, got 'no'"):
        shuffle_gradient_descent(
            half_square, torch.zeros(9, 2), constraint=L2Ball(1.0), lipschitz=2.0, smoothness=1.0, dimension=2, average="no",
            **BUDGET,
        )  # fmt: skip


@pytest.mark.parametrize("known", [{"dimension": 2}, {"initial": torch.zeros(2)}])
def test_a_box_between_two_numbers_takes_the_dimension_that_the_optimiser_knows(silent, known):
    data = torch.full((20, 2), 3.0, dtype=torch.float64)
    options = {"lipschitz": 9.0, "smoothness": 1.0, "rounds": 40, "step_size": 0.5, **BUDGET}
    found = shuffle_gradient_descent(half_square, data, constraint=Box(0.0, 1.0), average=False, **known, **options)
    assert torch.allclose(found.theta, torch.ones(2, dtype=torch.float64))
    with pytest.raises(ValueError, match="dimension must be given"):
        shuffle_gradient_descent(half_square, data, constraint=Box(0.0, 1.0), **options)


def test_losses_and_data_that_are_none_are_refused():
    options = {"constraint": L2Ball(1.0), "lipschitz": 2.0, "dimension": 2, **BUDGET}
    with pytest.raises(ValueError, match="loss must be a function"):
        shuffle_sgd(torch.nn.Linear(2, 1), torch.zeros(20, 2), **options)
    with pytest.raises(ValueError, match="at least one user"):
        shuffle_sgd(half_square, torch.zeros(0, 2), **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rounds": 3}, "rounds goes with method='gradient_descent'"),
        ({"method": "gradient_descent", "batch_size": 3}, "batch_size goes with the other methods"),
        ({"method": "newton"}, "method must be one of"),
        ({"method": "pan_private", "honest_fraction": 0.5}, "honest_fraction must be 1"),
        ({"strong_convexity": 2.0}, "smoothness must be at least strong_convexity"),
        ({"strong_convexity": 0.0}, "strong_convexity must be positive"),
        ({"phases": 21}, "phases must not exceed the 20 users"),
        ({"phases": 0}, "phases must be a whole number"),
    ],
)
def test_nonsensical_phases_are_refused(change, message):
    options = {
        "constraint": L2Ball(1.0),
        "lipschitz": 2.0,
        "smoothness": 1.0,
        "strong_convexity": 1.0,
        "dimension": 2,
        **BUDGET,
    }
    with pytest.raises(ValueError, match=message):
        shuffle_strongly_convex(Quadratic(2), torch.zeros(20, 2), **{**options, **change})


# ---- the result -------------------------------------------------------------------------------------------------------------


def test_results_speak_and_draw():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    data = torch.zeros(300, 2, dtype=torch.float64)
    estimate = shuffle_sgd(
        half_square, data, constraint=L2Ball(1.0), lipschitz=1.0, dimension=2, batch_size=50, average=False, **BUDGET
    )
    assert estimate.excess_loss_bound is None
    for words in ("2 parameters after 6 rounds", "nothing is proved for these settings", "epsilon = 1", "batch_size=50"):
        assert words in str(estimate)
    axes = estimate.plot()
    assert axes.get_xlabel() == "users so far"
    assert len(axes.lines[0].get_xdata()) == 6
    drawn = estimate.plot(value=lambda theta: float(theta.norm())).lines[0].get_ydata()
    assert drawn[-1] == pytest.approx(float(estimate.theta.norm()))
    full = shuffle_gradient_descent(
        half_square, data, constraint=L2Ball(1.0), lipschitz=1.0, smoothness=1.0, dimension=2, rounds=4, **BUDGET
    )
    assert "expected excess loss at most" in str(full)
    assert full.plot(axes).get_xlabel() == "rounds"


@pytest.mark.parametrize(("rounds", "kept"), [(1, 1), (200, 200), (201, 101), (5000, 200)])
def test_histories_keep_few_snapshots_and_always_the_last(rounds, kept):
    history = History(rounds)
    for step in range(rounds):
        history.add(users=step, gradient=torch.ones(1), theta=torch.full((1,), float(step)))
    assert sum(each.theta is not None for each in history.rounds) == kept
    assert float(history.rounds[-1].theta) == rounds - 1


def test_given_objectives_keep_their_dimension():
    objective = Objective.from_loss(half_square, dimension=2)
    estimate = shuffle_sgd(objective, torch.zeros(30, 2), constraint=L2Ball(1.0), lipschitz=1.0, batch_size=30, **BUDGET)
    assert estimate.theta.shape == (2,)
