"""Training by secret check-in: the law of what real steps release, and what is accounted.

Proofs: docs/proofs/12_secret_checkin.md and 13_linear_reports.md.
"""

from __future__ import annotations

import math

import opacus
import pytest
import torch
from helpers.private_runs import OURS, Run
from helpers.toy import here
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle import PrivacyEngine, compute_epsilon
from opacus_shuffle.analysis.report_shapes import shape_of

NAME, DELTA = "secret_checkin", 1e-5
ZOO = [pytest.param(report, marks=pytest.mark.zoo) for report in ("gaussian", "step")]
every_report = pytest.mark.parametrize("report", ["linear", *ZOO])
LOCAL = {"local_noise": True}


def released(x, *, batch_size, steps, norm=1.0, split=None, **options):
    """A run, and the sums and batch sizes of its steps; each record's gradient is its x."""
    model = here(nn.Linear(x.shape[1], 1, bias=False).to(x.dtype))
    toy = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.0),
        "data_loader": DataLoader(TensorDataset(here(x)), batch_size=batch_size),
        "max_grad_norm": norm,
    }
    run, sums, sizes = Run(NAME, toy=toy, loss_reduction="sum", **LOCAL, **options), [], [0]
    while len(sums) < steps:
        with run.split(split or len(x)) as batches:
            for (batch,) in batches:
                run.optimizer.zero_grad()
                run.model(batch).sum().backward()
                run.optimizer.step()
                sizes[-1] += len(batch)
                if not run.optimizer.last_step_was_skipped:
                    sums.append(model.weight.grad[0].double().cpu())
                    sizes.append(0)
    return run, torch.stack(sums), torch.tensor(sizes[:-1])


def is_normal(numbers, mean, deviation):
    """Whether all are draws of this distribution, by mean and variance: false once in 10⁹."""
    scaled = (numbers.flatten() - mean) / deviation
    count = scaled.numel()
    middle = abs(float(scaled.mean())) * math.sqrt(count) < stats.norm.isf(2.5e-10)
    spread = stats.chi2(count - 1)
    squares = float(((scaled - scaled.mean()) ** 2).sum())
    return middle and spread.ppf(2.5e-10) < squares < spread.isf(2.5e-10)


@every_report
@pytest.mark.parametrize(("split", "dtype"), [(None, torch.bfloat16), (3, torch.float32)])
def test_a_sum_without_gradients_is_the_noise_of_all_users_whatever_the_batch(report, split, dtype):
    """In half precision noise of a sum is rounded by 0.4 % at most."""
    x = torch.zeros(12, 400, dtype=dtype)
    run, sums, sizes = released(x, batch_size=3, steps=40, split=split, norm=0.5, report=report)
    assert len(sizes.unique()) > 3
    for rows in (sums, sums[sizes == sizes.min()], sums[sizes == sizes.max()]):
        assert is_normal(rows, 0.0, math.sqrt(12) * 2.0 * 0.5)
    assert run.accounted == run.updates == len(sums)


@every_report
def test_an_empty_batch_is_noised_and_released(report):
    _, sums, sizes = released(torch.ones(4, 300), batch_size=1, steps=40, report=report, sigma=1.0)
    empty = sums[sizes == 0]
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
    users, steps, sigma, rate = 24, 60, 0.5, 0.75
    x = torch.zeros(users, 6)
    x[: len(norms), 1] = torch.tensor(norms)
    _, sums, _ = released(x, batch_size=18, steps=steps, report=report, sigma=sigma, split=split)
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
    _, sums, _ = released(x, batch_size=1, steps=120, mode=mode, sigma=0.5, report=report)
    for axis, share in ((0, 1.0), (1, -0.5)):
        mean, variance = moments(report, 0.5, abs(share), 0.5)
        mean = math.copysign(mean, share)
        deviation = math.sqrt((variance + 0.25) / 120)
        assert abs(float(sums[:, axis].mean()) - mean) < 6.2 * deviation


def test_step_reports_are_above_their_threshold():
    """Where both users take part, on one line, nobody else's noise is on the sum along it.

    At σ = 0.5 no step report is below t. Of two linear ones the sum is below 2t one time in ten,
    and there are about 30 sums of both. Sums are in units of the norm, so 2t·σ is t.
    """
    _, sums, sizes = released(
        torch.tensor([[1.0, 0.0]] * 2), batch_size=1, steps=120, report="step", sigma=0.5
    )
    assert float(sums[sizes == 2, 0].min()) >= shape_of("step", 0.5).levels[0] - 1e-5


@every_report
def test_records_whose_gradients_are_no_numbers_send_noise_alone(report):
    x = torch.full((6, 300), math.nan)
    x[3:] = math.inf
    _, sums, _ = released(x, batch_size=4, steps=40, report=report)
    assert is_normal(sums, 0.0, math.sqrt(6) * 2.0)


@every_report
def test_the_account_is_that_of_the_rounds_within_a_budget(report):
    budget = {"target_epsilon": 2.0, "target_delta": DELTA, "epochs": 2}
    run = Run(NAME, sigma=None, report=report, **budget, **LOCAL).train().train()
    assert run.accounted == run.updates == 8
    numbers = {"num_users": 24, "sample_rate": 0.25, "report": report}
    numbers["noise_multiplier"] = run.optimizer.noise_multiplier
    spent = run.engine.get_epsilon(DELTA)
    assert 1.99 < spent <= 2.0
    assert spent == compute_epsilon(NAME, **numbers, steps=8, delta=DELTA)
    assert run.optimizer.expected_batch_size == 6  # q·n, not the size of the batch
    assert run.engine.privacy_report(DELTA).statement()


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


@pytest.mark.parametrize("accountant", [NAME, "shuffled_sums"])
@pytest.mark.parametrize(("name", "value"), [("noise_multiplier", 4.0), ("max_grad_norm", 2.0)])
def test_neither_noise_nor_norm_may_change_within_a_batch(name, value, accountant):
    """Reports with less noise than the others' would reveal the participants."""
    run = Run(accountant, records=60, batch_size=30, **OURS[accountant])
    with run.split(2) as physical, run.refused("change", goes_on=False):
        for part in physical:
            run.step(part)
            setattr(run.optimizer, name, value)


@pytest.mark.parametrize("users", [2, 15, 16, 17])
def test_secure_mode_s_grid_does_not_tell_how_many_take_part(users):
    """It is that of the noise of all: noise of fewer has a finer one below a power of two.

    Of two users both take part in every fourth step, which leaves no noise of others to round.
    """
    engine = PrivacyEngine(accountant=NAME, secure_mode=True)
    x = torch.ones(users, 50)
    _, sums, _ = released(x, batch_size=users // 2, steps=20, sigma=1.0, engine=engine)
    step = 2.0 ** (math.frexp(math.sqrt(users))[1] - 20)
    assert torch.equal((sums / step).round() * step, sums)
    assert (sums / step % 2 == 1).any()


def test_opacus_s_engine_emulates_gaussian_reports():
    """Noise on the sum stands for that of all n users: √n less in one report."""
    stock = Run(engine=opacus.PrivacyEngine(accountant=NAME)).train()
    ((mechanism, steps),) = stock.engine.accountant.rounds
    numbers = (mechanism.report, mechanism.num_users, mechanism.sample_rate, steps)
    assert numbers == ("gaussian", 24, 0.25, 4)
    assert mechanism.noise_multiplier == pytest.approx(2.0 / math.sqrt(24))
