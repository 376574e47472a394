"""A step releases what is clipped, noised and accounted, or nothing."""

from __future__ import annotations

import contextlib
import itertools
import math

import pytest
import torch
from helpers.private_runs import OURS, Run, same
from helpers.toy import make_toy, run_epoch
from opacus.schedulers import ExponentialGradClip, ExponentialNoise
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle import Guarantee, PrivacyEngine
from opacus_shuffle.analysis import gaussian

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
NORMS = [0.3, 0.4, 0.5, 0.6]
ADAPTIVE = {
    "clipping": "adaptive",
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 1e6,
    "min_clipbound": 1e-6,
    "unclipped_num_std": 1.0,
}
MODES = [
    *((mode, "flat") for mode in ("hooks", "functorch", "ghost")),
    *((mode, "per_layer") for mode in ("hooks", "functorch")),
]


# ---- noise ----------------------------------------------------------------------------------


def noise_of(run, epochs, *, physical=None, after=lambda: None):
    """The number of records and the released sum of each batch, where all gradients are zero."""
    releases, sizes = [], []

    def released(optimizer):
        gradients = torch.cat([parameter.grad.flatten() for parameter in optimizer.params])
        divisor = optimizer.expected_batch_size if optimizer.loss_reduction == "mean" else 1
        releases.append((sum(sizes), gradients.double() * divisor))
        sizes.clear()

    run.optimizer.attach_step_hook(released)
    for _ in range(epochs):
        with run.split(physical) if physical else contextlib.nullcontext(run.loader) as batches:
            for x, y in batches:
                sizes.append(len(x))
                run.optimizer.zero_grad()
                run.criterion(0 * run.model(x.to(run.network[0].weight.dtype)), y).backward()
                run.optimizer.step()
                after()
    return releases


def assert_normal(values, deviation=1.0):
    """Mean, variance and distribution of normal draws, to five standard errors (once in 1e5)."""
    values, count = values.cpu() / deviation, len(values)
    assert abs(float(values.mean())) < 5 / math.sqrt(count)
    assert abs(float(values.square().mean()) - 1) < 5 * math.sqrt(2 / count)
    assert stats.kstest(values.numpy(), "norm").pvalue > 1e-5


LOCAL = {"local_noise": True}
NOISE = [  # accountant, mode, clipping, options, size of physical batches, secure mode
    ("shuffled_checkin", "hooks", "flat", LOCAL, None, False),
    ("shuffled_checkin", "functorch", "per_layer", LOCAL, 2, False),
    ("shuffled_checkin", "ghost", "flat", LOCAL, 2, False),
    ("shuffle_gauss", "hooks", "flat", {**LOCAL, "poisson_sampling": False}, 4, False),
    ("shuffled_checkin", "hooks", "flat", {**LOCAL, "loss_reduction": "sum"}, None, False),
    ("shuffled_checkin", "no wrapper", "per_layer", {}, 2, False),
    ("shuffled_fw", "functorch", "flat", {}, 2, False),
    ("rdp", "ghost", "flat", {"poisson_sampling": False}, None, False),
    ("rdp", "ghost", "flat", {}, None, True),
    *(
        pytest.param(*run, marks=pytest.mark.zoo)
        for run in [
            ("subsampled_shuffle", "hooks", "flat", LOCAL, 2, False),
            ("shuffle_gauss", "ghost", "flat", LOCAL, None, False),
            ("rdp", "hooks", "flat", {}, 2, False),
            ("shuffle_gauss", "hooks", "per_layer", LOCAL, 2, True),
        ]
    ),
]


@pytest.mark.parametrize(("name", "mode", "clipping", "options", "physical", "secure"), NOISE)
def test_noise_is_root_k_sigma_c_of_k_reports_or_sigma_c_of_the_sum(
    name, mode, clipping, options, physical, secure
):
    """Of the k records really in the batch: an empty one sends nothing, and is a round."""
    norm, given = (math.hypot(*NORMS), NORMS) if clipping == "per_layer" else (0.9, 0.9)
    asked = {"sigma": 3.0, "clipping": clipping, "toy": {"max_grad_norm": given}, **options}
    run = Run(name, mode, engine=PrivacyEngine(accountant=name, secure_mode=secure), **asked)
    releases = noise_of(run, 6, physical=physical)
    assert len(releases) == run.accounted == run.updates == 24
    sizes = {records for records, _ in releases}
    fixed = name in ("subsampled_shuffle", "shuffle_gauss") or "poisson_sampling" in options
    assert sizes == {6} if fixed else len(sizes) > 3
    scale = [math.sqrt(records) if "local_noise" in options else 1.0 for records, _ in releases]
    drawn = [
        noise / deviation
        for (_, noise), deviation in zip(releases, scale, strict=True)
        if deviation
    ]
    assert_normal(torch.cat(drawn), 3.0 * norm)
    rows = torch.stack(drawn) / (3.0 * norm)
    # Between independent rounds a correlation of so many entries has this standard error.
    correlation = (rows @ rows.T / rows.shape[1]).fill_diagonal_(0)
    assert float(correlation.abs().max()) < 6 / math.sqrt(rows.shape[1])


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_an_empty_batch_releases_no_report_s_noise_and_is_accounted(mode):
    run = Run("shuffled_checkin", mode, records=6, batch_size=1, local_noise=True)
    releases = noise_of(run, 5)
    empty = [noise for records, noise in releases if not records]
    assert not torch.cat(empty).any()  # of thirty batches a third, or 10⁻⁵ of such runs has none
    assert run.accounted == len(releases) == 30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_noise_of_a_batch_is_that_of_its_own_records_whatever_was_left_half_way(dtype):
    """40 reports, not 5 besides that the loop was left after: noise of 45 has 6 % more."""
    wide = nn.Sequential(nn.Linear(5, 1500)).to(dtype)
    run = Run(records=80, batch_size=40, local_noise=True, toy={"module": wide})
    for left_before_the_step in (True, False):
        with run.split(5) as batches:
            x, y = next(iter(batches))
            run.optimizer.zero_grad()
            run.criterion(0 * run.model(x.to(dtype)), y).backward()
            if not left_before_the_step:
                run.optimizer.step()
        ((records, noise), _) = noise_of(run, 1, physical=20)
        assert records == 40
        # Of 9,000 draws the standard error is 0.75 %.
        assert float(noise.std()) == pytest.approx(2.0 * math.sqrt(40), rel=0.04)
    assert run.accounted == 4


def test_adaptive_clipping_s_noise_leaves_room_for_that_of_its_count():
    """Opacus's noise, by Theorem 1 of arXiv:1905.03871."""
    run = Run("rdp", sigma=1.5, toy={"max_grad_norm": 1.0}, **ADAPTIVE)
    norms = [1.0]
    releases = noise_of(run, 6, after=lambda: norms.append(float(run.optimizer.max_grad_norm)))
    drawn = [noise / norm for (_, noise), norm in zip(releases, norms[:-1], strict=True)]
    assert_normal(torch.cat(drawn), (1.5**-2 - (2 * 1.0) ** -2) ** -0.5)
    assert len(set(norms)) == len(norms)


@pytest.mark.parametrize("budget", [{}, {"target_epsilon": 3.0, "target_delta": 0.01, "epochs": 1}])
def test_adaptive_clipping_costs_what_the_noised_sum_and_the_noised_count_cost_together(budget):
    """One record moves the sum by C and the count by 1: two Gaussian mechanisms, at the rate 1."""
    options = {**ADAPTIVE, "unclipped_num_std": 1.01, **budget}
    run = Run("prv", sigma=None if budget else 2.0, batch_size=24, **options)
    foretold = run.optimizer.epsilon_after(1, 0.01)
    spent = run.train().engine.get_epsilon(0.01)
    drawn = run.optimizer.noise_multiplier**-2 - (2 * 1.01) ** -2  # σ⁻² of the noise on the sum
    exact = gaussian.compute_epsilon(mu=math.sqrt(drawn + 1.01**-2), delta=0.01)
    assert exact <= spent == foretold <= exact + 0.03  # three times the error of PRV accounting
    assert spent <= 3.0 if budget else exact == pytest.approx(2.295, abs=1e-3)
    best = run.engine.privacy_report(0.01).best
    assert (best.epsilon, best.guarantee) == (spent, Guarantee.ESTIMATE)
    assert "noised count of unclipped records" in best.adversary


@contextlib.contextmanager
def failing(run, error):
    """Inside, the accountant fails with this error, and the step ends by it."""

    def fails(*_, **__):
        raise error("no accounting today")

    method = "record" if hasattr(run.engine.accountant, "record") else "step"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(run.engine.accountant), method, fails)
        with pytest.raises(error, match="no accounting today"):
            yield


# ---- clipping -------------------------------------------------------------------------------


def released(name, x, y, mode, clipping="flat", *, norm=1.0, **options):
    """What 12 batches of a seeded run release, as sums, with the size of each."""
    torch.manual_seed(3)
    toy = {
        "module": nn.Sequential(nn.Linear(5, 4, bias=False), nn.Linear(4, 3, bias=False)),
        "data_loader": DataLoader(TensorDataset(x, y), batch_size=8),
        "max_grad_norm": [norm, norm] if clipping == "per_layer" else norm,
    }
    run = Run(
        name,
        mode,
        engine=PrivacyEngine(accountant=name, seed=1),
        sigma=1.0,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        toy=toy,
        clipping=clipping,
        **options,
    )
    sums, sizes = [], []
    for batch in itertools.islice(run.batches, 12):
        run.step(batch)
        gradients = torch.cat([parameter.grad.flatten() for parameter in run.network.parameters()])
        sums.append(gradients * run.optimizer.expected_batch_size)
        sizes.append(len(batch[0]))
    return sums, sizes, run.optimizer.expected_batch_size


def records(seed=0, scale=30.0):
    draws = torch.Generator().manual_seed(seed)
    return scale * torch.randn(50, 5, generator=draws), torch.randint(3, (50,), generator=draws)


INFLUENCE = [
    *((name, "hooks", "flat") for name in [*OURS, "rdp"]),
    *(pytest.param("shuffled_checkin", *mode, marks=pytest.mark.zoo) for mode in MODES[1:]),
    ("rdp", "ghost", "flat"),
    ("shuffled_sums", "ghost", "flat"),
    ("prv", "no wrapper", "per_layer"),
]


@pytest.mark.parametrize(("name", "mode", "clipping"), INFLUENCE)
def test_a_record_moves_a_release_by_its_clipped_gradient_over_a_public_number(
    name, mode, clipping
):
    """What sums are divided by tells nothing of a record (Opacus's issue 819)."""
    (x, y), neighbour = records(), records()[0]
    neighbour[0] = 0.0  # whose gradient is zero: the neighbour of zero-out adjacency
    ours, sizes, divisor = released(name, x, y, mode, clipping)
    theirs, same_sizes, same_divisor = released(name, neighbour, y, mode, clipping)
    assert (sizes, divisor) == (same_sizes, same_divisor)
    moved = [float((one - other).norm()) for one, other in zip(ours, theirs, strict=True)]
    norm = math.sqrt(2) if clipping == "per_layer" else 1.0
    grid = 0.5 if name == "shuffled_sums" else 0.0  # what random rounding adds to a report
    assert 0.95 * norm - 2 * grid < max(moved) <= norm + grid + 1e-4
    _, other_sizes, other_divisor = released(name, *records(1), mode, clipping)
    # The loader's batch size, or for coins of the rate of one of seven batches their mean.
    whole = name == "secret_checkin" or len({*sizes, *other_sizes}) == 1
    assert divisor == other_divisor == (8 if whole else round(50 / 7))
    if name in ("shuffle_gauss", "subsampled_shuffle"):
        assert {*sizes, *other_sizes} == {8}
    else:
        assert len(set(sizes)) > 1
        assert 0.0 in moved or grid  # after one more rounding all later draws are others


SPOILT = [
    *(("shuffled_checkin", *mode, math.nan) for mode in (MODES[0], *MODES[4:])),
    ("rdp", "ghost", "flat", math.inf),
    ("shuffled_sums", "functorch", "flat", math.inf),
    ("shuffled_sums", "ghost", "flat", math.nan),
]


@pytest.mark.parametrize(
    ("name", "mode", "clipping", "bad"),
    [
        *(("shuffled_checkin", *mode, math.nan) for mode in MODES[1:4]),
        ("subsampled_shuffle", "hooks", "flat", 3e38),  # whose norm overflows
        ("shuffled_sums", "hooks", "flat", math.nan),
        ("shuffled_sums", "ghost", "flat", 3e38),
        ("rdp", "no wrapper", "per_layer", math.nan),
        *(pytest.param(*row, marks=pytest.mark.zoo) for row in SPOILT),
    ],
)
def test_a_record_that_cannot_be_clipped_reports_zero_and_nothing_tells_of_it(
    name, mode, clipping, bad
):
    """Opacus lets one NaN make the sum NaN; an error would be an event that no ε speaks of."""
    (x, y), neighbour, whole = records(), records()[0], records()[0]
    x[17], neighbour[17] = bad, 0.0
    ours, theirs, others = (
        released(name, features, y, mode, clipping)[0] for features in (x, neighbour, whole)
    )
    assert not all(map(torch.equal, theirs, others))  # it is in one of the batches
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("mode", "clipping"), [*MODES[:3], ("hooks", "per_layer")])
@pytest.mark.parametrize("half", ["bfloat16", "autocast"])
def test_no_record_exceeds_the_norm_in_half_precision(mode, clipping, half):
    network = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 3))
    for parameter in network.parameters():
        parameter.data.mul_(20)
    dtype = torch.bfloat16 if half == "bfloat16" else torch.float32
    norm = [0.5] * 4 if clipping == "per_layer" else 1.0
    toy = {"module": network.to(dtype), "max_grad_norm": norm}
    asked = {"loss_reduction": "sum", "clipping": clipping}
    run, worst = Run("subsampled_shuffle", mode, records=16, batch_size=1, toy=toy, **asked), 0.0
    for x, y in run.loader:
        run.optimizer.zero_grad()
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=half == "autocast"):
            loss = run.criterion(run.model((3 * x).to(dtype)), y)
        loss.backward()
        run.optimizer.step()
        sums = [float(parameter.summed_grad.double().norm()) for parameter in run.optimizer.params]
        worst = max(worst, math.hypot(*sums))
    # Under autocast layers may have gradients in single precision, whose norms are right to 2⁻¹⁸.
    assert 0.98 < worst <= 1.0 + (2**-18 if half == "autocast" else 0.0)


@pytest.mark.parametrize(("bad", "share"), [(0, 1.0), (3, 5 / 8)])
def test_adaptive_clipping_counts_each_record_once_and_one_that_is_not_finite_as_clipped(
    bad, share
):
    """The norm is multiplied by exp(−η(unclipped share − target)); its noise is 0.02/8."""
    options = {**ADAPTIVE, "unclipped_num_std": 0.02, "clipbound_learning_rate": 1.0}
    options |= {"poisson_sampling": False, "toy": {"max_grad_norm": 100.0}}
    run = Run("rdp", sigma=0.01, records=8, batch_size=8, **options)
    x, y = run.batch()
    x[:bad] = math.nan
    with failing(run, ValueError):
        run.step((x, y))
    run.step((x, y))  # a batch that is tried again counts once, too
    expected = 100 * math.exp(0.5 - share)
    assert float(run.optimizer.max_grad_norm) == pytest.approx(expected, rel=0.02)
    for batch in ((x[:0], y[:0]), (x[4:], y[4:]), (x[:0], y[:0])):
        run.step(batch)  # where Opacus divides by nothing
        assert math.isfinite(run.optimizer.max_grad_norm)
    assert all(value.isfinite().all() for value in run.weights().values())
    ((noise, rate, steps),) = run.engine.accountant.history
    assert (noise, rate, steps) == (pytest.approx((0.01**-2 + 0.75 * 0.02**-2) ** -0.5), 1.0, 4)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("name", ["max_grad_norm", "noise_multiplier"])
@pytest.mark.parametrize("value", [math.inf, 1e39, math.nan])  # single precision ends at 3.4e38
def test_a_norm_or_noise_that_is_not_finite_is_refused_at_the_step(name, value, mode):
    run = Run("rdp", mode)
    run.step()
    finite = getattr(run.optimizer, name)
    said = "max_grad_norm must be positive.*set both to finite|max_grad_norm is .* for the noise"
    with run.refused(said, goes_on=False):
        setattr(run.optimizer, name, value)
        run.step()
    setattr(run.optimizer, name, finite)
    run.step()
    assert run.accounted == 2


# ---- accounting -----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize(
    ("name", "mode"), [*((name, "hooks") for name in [*OURS, "rdp"]), ("shuffled_checkin", "ghost")]
)
def test_where_accounting_fails_nothing_was_released_and_the_ticket_is_unused(name, mode, error):
    run = Run(name, mode)
    batch, before = run.batch(), run.weights()
    for _ in range(2):
        run.optimizer.zero_grad()
        run.backward(batch)
        raw = [parameter.grad.clone() for parameter in run.optimizer.params]
        with failing(run, error):
            run.optimizer.step()
        for parameter, gradient in zip(run.optimizer.params, raw, strict=True):
            assert parameter.grad is None or torch.equal(parameter.grad, gradient)  # no noise yet
            assert parameter.summed_grad is None
            assert getattr(parameter, "grad_sample", None) is None
        assert (run.updates, run.accounted) == (0, 0)
        assert same(run.weights(), before)
    run.step(batch)
    assert (run.updates, run.accounted) == (1, len(run.loader) if run.by_epochs else 1)
    with run.refused("stepped on already"):
        run.step(batch)


def test_a_step_over_two_batches_is_accounted_at_twice_the_rate():
    """Opacus lets batches of the user's own loader be accumulated: a record may be in either."""
    run = Run("rdp", poisson_sampling=False)
    batches = list(run.loader)
    run.train(batches + batches)
    run.optimizer.zero_grad()
    run.backward(batches[0])
    run.backward(batches[1])
    run.optimizer.step()
    assert run.engine.accountant.history == [(2.0, 0.25, 8), (2.0, 0.5, 1)]
    with run.refused("neither clipped, noised nor accounted"):
        run.plain.step()


def test_schedulers_reach_the_noise_the_norm_and_the_account():
    run = Run("shuffle_gauss", sigma=3.0, local_noise=True)
    noise = ExponentialNoise(run.optimizer, gamma=0.5)
    clip = ExponentialGradClip(run.optimizer, gamma=0.7)
    for sigma, norm in ((3.0, 1.0), (1.5, 0.7)):
        releases = noise_of(run, 6)
        assert_normal(torch.cat([drawn for _, drawn in releases]), sigma * norm * math.sqrt(6))
        run.optimizer.attach_step_hook(None)
        noise.step()
        clip.step()
    assert run.engine.accountant.history == [(3.0, 0.25, 24), (1.5, 0.25, 24)]


@pytest.mark.parametrize(
    ("mode", "clipping", "before", "inside"),
    [
        ("hooks", "flat", 1.0, 0.5),
        ("ghost", "flat", 1.0, 0.5),
        ("ghost", "flat", 0.5, 1.0),
        ("hooks", "per_layer", 0.5, 1.0),
        ("hooks", "flat", -50.0, 1.0),
    ],
)
def test_a_sum_that_was_clipped_to_another_norm_than_its_noise_is_made_for_is_refused(
    mode, clipping, before, inside
):
    """The norm changes by these factors: before the batch, and between its physical batches."""
    toy = {"max_grad_norm": NORMS if clipping == "per_layer" else 1.0}
    run = Run("shuffle_gauss", mode, toy=toy, clipping=clipping)
    run.optimizer.max_grad_norm *= before
    weights = run.weights()

    def changed(batch):
        run.step(batch)
        run.optimizer.max_grad_norm *= inside

    with run.split(2) as batches, pytest.raises(ValueError, match="max_grad_norm"):
        list(map(changed, batches))
    assert same(run.weights(), weights)
    assert run.accounted == 0


@pytest.mark.parametrize("name", ["shuffled_checkin", "rdp"])
def test_a_sum_is_divided_by_no_number_that_follows_the_batch(name):
    run = Run(name)
    x, y = run.batch()
    with run.refused("expected_batch_size is .* a divisor that follows the batch", goes_on=False):
        run.optimizer.expected_batch_size += 1
        run.step((x, y))


# ---- what is trained ------------------------------------------------------------------------


def test_a_clipped_gradient_that_is_clipped_again_is_refused_by_name():
    run = Run(mode="ghost")
    run.backward()
    nn.utils.clip_grad_norm_(run.network.parameters(), 1e-3)
    with run.refused("gradients were changed .*clip_grad_norm_"):
        run.optimizer.step()


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("subsampled_shuffle", "ghost"),
        ("rdp", "functorch"),
        ("shuffled_sums", "hooks"),
        ("shuffled_sums", "ghost"),
    ],
)
@pytest.mark.parametrize("what", ["frozen", "thawed", "all frozen", "taken out"])
def test_parameters_that_were_frozen_or_thawed_since_are_not_stepped_on(name, mode, what):
    """Opacus would clip those that require a gradient now, and move all that have one."""
    network = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    network[0].bias.requires_grad_(False)
    run = Run(name, mode, toy={"module": network})
    run.backward()
    before = run.weights()
    if what == "taken out":
        run.optimizer.param_groups[0]["params"] = run.optimizer.param_groups[0]["params"][:2]
    network[0].bias.requires_grad_(what == "thawed")
    network[0].weight.requires_grad_("frozen" not in what)
    network[2].requires_grad_(what != "all frozen")
    with pytest.raises(ValueError, match="frozen or thawed"):
        run.optimizer.step()
    assert same(run.weights(), before)
    assert run.accounted == 0


def test_a_gradient_that_was_left_on_a_frozen_parameter_is_not_released():
    network = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    network(torch.randn(2, 5)).sum().backward()
    network[0].requires_grad_(False)
    run = Run(toy={"module": network})
    before = run.weights()
    run.step()
    assert not torch.equal(network[2].weight, before["2.weight"])
    assert torch.equal(network[0].weight, before["0.weight"])


# ---- where tensors are made ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, "hooks") for name in OURS),
        # With secret_checkin every record's own gradient is reported.
        *((name, "ghost") for name in OURS if name != "secret_checkin"),
    ],
)
def test_a_default_device_of_the_user_s_is_for_the_user_s_tensors_alone(name, mode):
    """On the default device here nothing can be computed: whatever we made there would fail."""
    toy, engine = make_toy(), PrivacyEngine(accountant=name)
    torch.set_default_device("meta")
    try:
        model, optimizer, *criterion, loader = engine.make_private(
            **toy, noise_multiplier=2.0, grad_sample_mode=mode, **OURS[name]
        )
        run_epoch(model, optimizer, loader, *criterion)
    finally:
        torch.set_default_device(None)
    assert engine.accountant.history
