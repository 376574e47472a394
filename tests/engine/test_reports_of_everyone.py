"""Training by secret check-in: the law of what real steps release, and what is accounted.

Proofs: docs/proofs/12_secret_checkin.md and 13_linear_reports.md.
"""

from __future__ import annotations

import math
import warnings

import opacus
import pytest
import torch
from helpers.private_runs import Run, same
from helpers.toy import here, make_toy
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle import PrivacyEngine, compute_epsilon
from opacus_shuffle.analysis.report_shapes import shape_of

NAME, DELTA = "secret_checkin", 1e-5
SHAPES = ("linear", "gaussian", pytest.param("step", marks=pytest.mark.zoo))
every_report = pytest.mark.parametrize("report", SHAPES)
LOCAL = {"local_noise": True}


class OneNumberMore(nn.Module):
    """A linear layer and a parameter that is one number, which shifts what it says."""

    def __init__(self, features):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(features))
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x @ self.weight + self.shift


def released(x, *, batch_size, steps, norm=1.0, split=None, network=None, sigma=2.0, **options):
    """The sums that steps release, as rows, and the engine; each record's gradient is its x."""
    model = here(nn.Linear(x.shape[1], 1, bias=False) if network is None else network)
    engine = options.pop("engine", None) or PrivacyEngine(accountant=NAME)
    mode = options.pop("grad_sample_mode", "hooks")
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(here(x)), batch_size=batch_size),
        noise_multiplier=sigma,
        max_grad_norm=norm,
        loss_reduction="sum",
        grad_sample_mode=mode,
        **LOCAL,
        **options,
    )
    run = Run.__new__(Run)
    run.loader, run.optimizer = loader, optimizer
    rows, sizes = [], []
    while len(rows) < steps:
        with run.split(split or len(x)) as batches:
            size = 0
            for (batch,) in batches:
                private(batch).sum().backward()
                optimizer.step()
                size += len(batch)
                if not optimizer.last_step_was_skipped:
                    gradients = [one.grad.flatten().float() for one in model.parameters()]
                    rows.append(torch.cat(gradients))
                    sizes.append(size)
                    size = 0
                optimizer.zero_grad()
    return torch.stack(rows).double().cpu(), sizes, engine


def is_normal(numbers, mean, deviation):
    """Whether all are draws of this distribution, by mean and variance: false once in 10⁹."""
    scaled = (numbers.flatten() - mean) / deviation
    count = scaled.numel()
    middle = abs(float(scaled.mean())) * math.sqrt(count) < stats.norm.isf(2.5e-10)
    spread = stats.chi2(count - 1)
    squares = float(((scaled - scaled.mean()) ** 2).sum())
    return middle and spread.ppf(2.5e-10) < squares < spread.isf(2.5e-10)


@every_report
@pytest.mark.parametrize("split", [None, 3])
def test_a_sum_without_gradients_is_the_noise_of_all_users_whatever_the_batch(report, split):
    sums, sizes, engine = released(
        torch.zeros(12, 400), batch_size=3, steps=40, split=split, norm=0.5, report=report
    )
    assert len(set(sizes)) > 3
    assert is_normal(sums, 0.0, math.sqrt(12) * 2.0 * 0.5)
    for some in (min(sizes), max(sizes)):
        rows = sums[torch.tensor(sizes) == some]
        assert is_normal(rows, 0.0, math.sqrt(12) * 2.0 * 0.5)
    assert engine.accountant.rounds[0][1] >= 40


@every_report
def test_an_empty_batch_is_noised_and_released(report):
    sums, sizes, _ = released(torch.ones(4, 300), batch_size=1, steps=40, report=report, sigma=1.0)
    empty = sums[torch.tensor(sizes) == 0]
    assert len(empty) > 3
    assert is_normal(empty, 0.0, 2.0)


def moments(report, sigma, share, rate):
    """Mean and variance of the part of a report along a vector of this share of the norm."""
    z = torch.linspace(-12, 20, 64_001, dtype=torch.float64)
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    if report == "gaussian":
        return rate * share, sigma**2 + rate * (1 - rate) * share**2
    ratio = 1 + rate * share * torch.from_numpy(shape_of(report, sigma).excess(z.numpy()))
    mean, square = ((density * ratio * z**power).sum() * sigma**power for power in (1, 2))
    return float(mean), float(square - mean**2)


@every_report
@pytest.mark.parametrize(
    ("norms", "split"),
    [
        ([1.0] * 20, 8),
        pytest.param([1.0, 0.5], None, marks=pytest.mark.zoo),
        pytest.param([3.0] * 20, None, marks=pytest.mark.zoo),
    ],
)
def test_the_part_along_a_gradient_has_the_mean_and_the_noise_that_are_promised(
    report, norms, split
):
    """n users, of whom some have gradients on one line, clipped to 1; across it is noise alone.

    Variances by chi-square with twice its deviation, as tilted parts are no normal numbers.
    """
    users, steps, sigma, rate = 24, 100, 0.5, 0.75
    x = torch.zeros(users, 6)
    x[: len(norms), 1] = torch.tensor(norms)
    sums, _, _ = released(x, batch_size=18, steps=steps, report=report, sigma=sigma, split=split)
    means, variances = zip(
        *(moments(report, sigma, min(norm, 1.0), rate) for norm in norms), strict=True
    )
    mean, variance = sum(means), sum(variances) + (users - len(norms)) * sigma**2
    along, across = sums[:, 1], sums[:, [0, 2, 3, 4, 5]]
    assert abs(float(along.mean()) - mean) < 6.2 * math.sqrt(variance / steps)
    assert abs(float(along.var()) / variance - 1) < 6.2 * 2 * math.sqrt(2 / steps)
    assert is_normal(across, 0.0, math.sqrt(users) * sigma)


@pytest.mark.parametrize("report", ["linear", "step"])
@pytest.mark.parametrize(
    "mode", ["hooks", *(pytest.param(mode, marks=pytest.mark.zoo) for mode in ("functorch",))]
)
def test_reports_in_other_directions_keep_their_own(mode, report):
    """Two users' gradients at a right angle: each is on its own axis, with its own share."""
    x = torch.zeros(2, 2)
    x[0, 0], x[1, 1] = 1.0, -0.5
    sums, _, _ = released(
        x, batch_size=1, steps=120, grad_sample_mode=mode, sigma=0.5, report=report
    )
    for axis, share in ((0, 1.0), (1, -0.5)):
        mean, variance = moments(report, 0.5, abs(share), 0.5)
        mean = math.copysign(mean, share)
        deviation = math.sqrt((variance + 0.25) / 120)
        assert abs(float(sums[:, axis].mean()) - mean) < 6.2 * deviation


def test_step_reports_are_above_their_threshold():
    """Where both users take part, on one line, nobody else's noise is on the sum along it.

    At σ = 0.5 no step report is below t. Of two linear ones the sum is below 2t one time in ten,
    and there are about 50 sums of both. Sums are in units of the norm, so 2t·σ is t.
    """
    sums, sizes, _ = released(
        torch.tensor([[1.0, 0.0]] * 2), batch_size=1, steps=200, report="step", sigma=0.5
    )
    assert float(sums[torch.tensor(sizes) == 2, 0].min()) >= shape_of("step", 0.5).levels[0] - 1e-5


@pytest.mark.parametrize("kind", ["bfloat16", "one number"])
def test_half_precision_and_single_numbers_are_reported(kind):
    """In half precision noise of a sum is rounded by 0.4 % at most."""
    x = torch.zeros(8, 200)
    x[:, 0] = 1.0
    if kind == "one number":
        network, dtype, mode = OneNumberMore(200), torch.float32, "functorch"
    else:
        network, dtype, mode = nn.Linear(200, 1, bias=False).bfloat16(), torch.bfloat16, "hooks"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sums, _, _ = released(
            x.to(dtype),
            batch_size=4,
            steps=100,
            network=network,
            grad_sample_mode=mode,
            sigma=0.5,
        )
    # Along one axis, or along half of two: none of the others is touched.
    assert is_normal(sums[:, 2:200], 0.0, math.sqrt(8) * 0.5)
    assert float(sums[:, 0].mean()) > 1.0


@every_report
def test_records_whose_gradients_are_no_numbers_send_noise_alone(report):
    x = torch.full((6, 300), math.nan)
    x[3:] = math.inf
    sums, _, _ = released(x, batch_size=4, steps=40, report=report)
    assert is_normal(sums, 0.0, math.sqrt(6) * 2.0)


@every_report
def test_the_account_is_that_of_the_rounds(report):
    run = Run(NAME, report=report, **LOCAL).train().train()
    assert run.accounted == run.updates == 8
    numbers = {"num_users": 24, "sample_rate": 0.25, "noise_multiplier": 2.0, "report": report}
    assert run.engine.get_epsilon(DELTA) == compute_epsilon(NAME, **numbers, steps=8, delta=DELTA)
    assert run.optimizer.expected_batch_size == 6  # q·n, not the size of the batch
    assert run.engine.privacy_report(DELTA).statement()


def test_the_rate_is_the_loader_s_batch_over_the_records():
    run = Run(NAME, records=20, batch_size=16, **LOCAL)
    assert run.engine.accountant.planned.sample_rate == 0.8
    assert run.optimizer.expected_batch_size == 16


def test_noise_is_found_for_a_budget():
    run = Run(NAME, sigma=None, target_epsilon=2.0, target_delta=DELTA, epochs=2, **LOCAL)
    spent = run.train().train().engine.get_epsilon(DELTA)
    assert 1.99 < spent <= 2.0
    assert run.optimizer.expected_batch_size == 6


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "shuffled_checkin",
            {"report": "linear", **LOCAL},
            "goes with accountant='secret_checkin'",
        ),
        ("shuffled_sums", {"report": "linear"}, "goes with accountant='secret_checkin'"),
        ("rdp", {"report": "gaussian"}, "goes with accountant='secret_checkin'"),
        (NAME, {"report": "bits", **LOCAL}, "report must be one of"),
        (NAME, {"report": "linear"}, "pass local_noise=True"),
        (NAME, {"report": "step"}, "'step' is drawn by each record's user: pass local_noise=True"),
        (NAME, {"report": "step", "sigma": 0.1, **LOCAL}, "of step reports must be at least 0.2"),
        (NAME, {"mode": "ghost", **LOCAL}, "grad_sample_mode"),
        (NAME, {"clipping": "per_layer", "toy": {"max_grad_norm": [0.5] * 4}, **LOCAL}, "clipping"),
        (NAME, {"clipping": "adaptive", **LOCAL}, "clipping"),
        (NAME, {"batch_size": 24, **LOCAL}, "must be below 1"),
        (NAME, {"sigma": 0.1, **LOCAL}, "must be at least 0.2"),
        (NAME, {"poisson_sampling": False, **LOCAL}, "Poisson batches"),
        (NAME, {"rand_on_empty": True, **LOCAL}, "rand_on_empty"),
    ],
)
def test_what_does_not_go_together_is_refused(name, options, words):
    with pytest.raises(ValueError, match=words):
        Run(name, **options)


def test_gaussian_reports_go_with_what_linear_ones_do_not():
    for options in (
        {"mode": "ghost"},
        {"clipping": "per_layer", "toy": {"max_grad_norm": [0.5] * 4}},
        {"sigma": 0.1},
    ):
        assert Run(NAME, report="gaussian", **LOCAL, **options).train().updates == 4


@pytest.mark.parametrize(("name", "value"), [("noise_multiplier", 4.0), ("max_grad_norm", 2.0)])
def test_neither_noise_nor_norm_may_change_within_a_batch(name, value):
    """Of reports of less noise than the others' it would be seen who took part."""
    run = Run(NAME, records=60, batch_size=30, **LOCAL)

    def train():
        with run.split(2) as physical:
            for number, part in enumerate(physical):
                run.backward(part)
                if number == 1:
                    setattr(run.optimizer, name, value)
                run.optimizer.step()
                run.optimizer.zero_grad()

    weights = run.weights()
    with pytest.raises(ValueError, match="change"):
        train()
    assert run.accounted == run.updates == 0
    assert same(weights, run.weights())


@pytest.mark.parametrize("users", [2, 15, 16, 17])
def test_secure_mode_s_grid_does_not_tell_how_many_take_part(users):
    """It is that of the noise of all: noise of fewer has a finer one below a power of two.

    Of two users both take part in every fourth step, which leaves no noise of others to round.
    """
    engine = PrivacyEngine(accountant=NAME, secure_mode=True)
    x = torch.ones(users, 50)
    sums, _, _ = released(x, batch_size=users // 2, steps=20, sigma=1.0, engine=engine)
    step = 2.0 ** (math.frexp(math.sqrt(users))[1] - 20)
    assert torch.equal((sums / step).round() * step, sums)
    assert (sums / step % 2 == 1).any()


def test_opacus_s_engine_emulates_gaussian_reports():
    """Noise on the sum stands for that of all n users: √n less in one report."""
    engine = opacus.PrivacyEngine(accountant=NAME)
    private, optimizer, loader = engine.make_private(**make_toy(), noise_multiplier=2.0)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(private(x), y).backward()
        optimizer.step()
    ((mechanism, steps),) = engine.accountant.rounds
    assert mechanism.report == "gaussian"
    assert mechanism.noise_multiplier == pytest.approx(2.0 / math.sqrt(24))
    assert (mechanism.num_users, mechanism.sample_rate, steps) == (24, 0.25, len(loader))
