"""What a problem may be made of, what its users report, and what is refused by name."""

import math

import pytest
import torch
from helpers.convex_problems import BUDGET, half_square, logistic_data, normal, seeded, solve

from opacus_shuffle.sco import (
    Box,
    L2Ball,
    MoreauEnvelope,
    Objective,
    Problem,
    absolute_loss,
    logistic_loss,
    shuffle_accelerated_sgd,
    shuffle_sgd,
)
from opacus_shuffle.sco.records import take

BALL = L2Ball(1.0)


def envelope(beta):
    return MoreauEnvelope(Objective.from_loss(absolute_loss, dimension=3), beta)


def test_envelopes_are_losses_too_and_losses_with_kinks_are_smoothed():
    def solved(loss, **more):
        known = {"constraint": L2Ball(5.0), "lipschitz": 1.0, "batch_size": 100, **BUDGET}
        options = {"generator": seeded(0), **known, **more}
        return solve(shuffle_accelerated_sgd, loss, logistic_data(300), **options)

    assert solved(envelope(3.0)).choices["smoothness"] == 3.0
    smoothed, own = (
        solved(absolute_loss, initial=torch.zeros(3), envelope=given) for given in (None, envelope)
    )
    assert torch.equal(own.theta, smoothed.theta)
    # The cost of smoothing is in the bound.
    assert own.excess_loss_bound > 1 / (2 * own.choices["smoothness"])


def test_a_known_distance_improves_the_bound():
    data = torch.zeros(300, 2, dtype=torch.float64)
    options = {"lipschitz": 5.0, "dimension": 2, "batch_size": 50, **BUDGET}
    bounds = [
        solve(shuffle_sgd, half_square, data, **known, **options).excess_loss_bound
        for known in (
            {"constraint": L2Ball(4.0), "diameter": 0.5},
            {"constraint": L2Ball(4.0)},
            {"constraint": Box(-(8.0**0.5), 8.0**0.5)},
            {"constraint": L2Ball(4.0), "initial": torch.tensor([2.0, 0.0])},
            {"constraint": L2Ball(4.0, torch.tensor([3.0, 0.0]))},
        )
    ]
    assert [bound / bounds[0] for bound in bounds] == pytest.approx([1, 8, 16, 12, 14])


# ---- what users report


def reported(loss, data, theta, *, clip, lipschitz=2.0):
    """Every record's report at θ."""
    problem = Problem(loss, data, constraint=BALL, dimension=2, lipschitz=lipschitz, clip=clip)
    return problem.bounded_gradients(problem.objective, theta, data)


def test_long_gradients_are_refused_or_cut():
    data, zero = torch.tensor([[3.0, 4.0]]).double().repeat(4, 1), torch.zeros(2)
    for lipschitz in (2.0, 5.0 * (1 - 1.1e-5)):
        with pytest.raises(
            ValueError, match=r"lipschitz must bound .* and a longer gradient: pass"
        ):
            reported(half_square, data, zero, clip=False, lipschitz=lipschitz)
    cut = reported(half_square, data, zero, clip=True)
    assert torch.allclose(cut, torch.tensor([-1.2, -1.6]).double())
    # Rounding is forgiven, and scaled back.
    norms = reported(half_square, data, zero, clip=False, lipschitz=5.0 * (1 - 5e-6)).norm(dim=1)
    assert norms.tolist() == pytest.approx([5.0 * (1 - 5e-6)] * 4, rel=1e-12)


def unusable():
    """Losses for which some records are unusable, data, and what to put into a record."""
    data = normal(9, 2, seed=3)

    def classes(theta, batch):
        return torch.nn.functional.cross_entropy(batch[0] * theta, batch[1], reduction="none")

    return {
        "not finite": (half_square, data, math.nan),
        "no sign": (logistic_loss, (data, torch.ones(9)), 0.0),
        "no class": (classes, (data, torch.ones(9).long()), 2),
    }


@pytest.mark.parametrize("case", unusable())
def test_unusable_records_report_zero_where_long_gradients_are_cut_and_change_nothing_else(case):
    loss, data, value = unusable()[case]
    theta = torch.tensor([0.1, 0.2], dtype=torch.float64)

    def spoilt(records):
        changed = [part.clone() for part in (data if isinstance(data, tuple) else (data,))]
        changed[-1][records] = value
        return tuple(changed) if isinstance(data, tuple) else changed[0]

    clean = reported(loss, data, theta, clip=True)
    for records in ([0], [4, 8], list(range(1, 9)), list(range(9))):
        with pytest.raises((ValueError, IndexError)):
            reported(loss, spoilt(records), theta, clip=False)
        rows = reported(loss, spoilt(records), theta, clip=True)
        others = [i for i in range(9) if i not in records]
        assert torch.equal(rows[others], clean[others])
        assert float(rows[records].abs().max()) == 0
        # Whether all are unusable is a fact about records too.
        alone = reported(loss, take(spoilt(records), records[:1]), theta, clip=True)
        assert alone.tolist() == [[0, 0]]


@pytest.mark.parametrize("spoil", [None, math.nan, math.inf, 1e200])
@pytest.mark.parametrize("loss", [logistic_loss, absolute_loss, half_square])
def test_the_sum_of_reports_is_the_sum_of_their_rows(loss, spoil):
    """Gradients that are a number times the record's features are never written out."""
    features = 3 * normal(9, 2, seed=3)  # some gradients are longer than 2 and cut
    data = features if loss is half_square else (features, torch.ones(9).double())
    if spoil is not None:
        features[4, 0] = spoil
    theta = torch.tensor([0.1, 0.2], dtype=torch.float64)
    problem = Problem(loss, data, constraint=BALL, dimension=2, lipschitz=2.0, clip=True)
    objectives = [problem.objective]
    if loss is not half_square:
        objectives.append(MoreauEnvelope(problem.objective, 0.3))
    for objective in objectives:
        rows = problem.bounded_gradients(objective, theta, data)
        total = problem.sum_of_gradients(objective, theta, data)
        assert torch.allclose(total, rows.sum(0), rtol=1e-12, atol=1e-12)


def test_mistakes_in_the_call_are_refused_even_where_long_gradients_are_cut(silent):
    options = {"constraint": BALL, "lipschitz": 2.0, "dimension": 2, "clip": True, **BUDGET}
    data = torch.zeros(20, 3), torch.zeros(20)
    for batch_size in (1, 5):
        with pytest.raises(ValueError, match=r"x must be a floating-point tensor of shape \(B, 2"):
            solve(shuffle_sgd, absolute_loss, data, batch_size=batch_size, **options)


def test_messages_hold_no_numbers_of_records():
    """How many records are unusable, and how long a gradient is, are exact facts about data."""
    records = torch.ones(7, 2, dtype=torch.float64)
    spoilt = records.clone()
    spoilt[3] = math.nan
    for data, slope in ((spoilt, 1.0), (records, 31.25)):
        with pytest.raises(ValueError, match="clip=True") as refused:
            reported(lambda t, x, slope=slope: slope * (x @ t), data, torch.ones(2), clip=False)
        assert not set("1345679") & set(str(refused.value))
