"""Long gradients and unusable records are refused, or cut and replaced by zero."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.convex_problems import (
    BUDGET,
    half_square,
    seeded,
    solve,
)

from opacus_shuffle.sco import (
    L2Ball,
    MoreauEnvelope,
    Objective,
    absolute_loss,
    logistic_loss,
    shuffle_sgd,
)
from opacus_shuffle.sco.bounded_gradients import BoundedGradients
from opacus_shuffle.sco.records import take


def test_long_gradients_are_refused_or_cut(silent):
    data = torch.tensor([[3.0, 4.0]], dtype=torch.float64).repeat(4, 1)
    options = {
        "constraint": L2Ball(10.0),
        "dimension": 2,
        "batch_size": 4,
        "steps": "practical",
        "step_size": 1.0,
        **BUDGET,
    }
    with pytest.raises(
        ValueError, match=r"lipschitz must bound .* got 2 and a longer gradient: pass a larger"
    ):
        solve(shuffle_sgd, half_square, data, lipschitz=2.0, **options)
    cut = solve(shuffle_sgd, half_square, data, lipschitz=2.0, clip=True, **options)
    assert torch.allclose(cut.theta, torch.tensor([1.2, 1.6], dtype=torch.float64))
    # Rounding is forgiven, and scaled back.
    whole = solve(shuffle_sgd, half_square, data, lipschitz=5.0 * (1 - 5e-6), **options)
    assert float(whole.theta.norm()) == pytest.approx(5.0 * (1 - 5e-6))


def unusable():
    """Objectives for which some records are unusable, these records, and data."""
    data = torch.randn(9, 2, generator=seeded(3), dtype=torch.float64)

    def steep(theta, batch):
        return (batch - theta).abs().sum(1) * (1 + batch.abs().max() // 50)

    def labelled(theta, batch):
        return torch.nn.functional.cross_entropy(batch[0] * theta, batch[1], reduction="none")

    general = Objective.from_loss(steep, dimension=2)
    return {
        "not finite": (Objective.from_loss(half_square, dimension=2), data, math.nan),
        "steeper than told": (MoreauEnvelope(general, 1.0, lipschitz=2.0), data, 99.0),
        "no sign": (Objective.from_loss(logistic_loss, dimension=2), (data, torch.ones(9)), 0.0),
        "no class": (Objective.from_loss(labelled, dimension=2), (data, torch.ones(9).long()), 2),
    }


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

    refuse, cut = (BoundedGradients(objective, 2.0, clip) for clip in (False, True))
    clean = cut.rows(theta, data)
    for records in ([0], [4, 8], list(range(1, 9))):
        with pytest.raises((ValueError, IndexError)):
            refuse.rows(theta, spoilt(records))
        rows = cut.rows(theta, spoilt(records))
        others = [i for i in range(9) if i not in records]
        assert torch.equal(rows[others], clean[others])
        assert float(rows[records].abs().max()) == 0
        alone = cut.rows(theta, take(spoilt(records), records[:1]))
        assert alone.shape == (1, 2)
        assert float(alone.abs().max()) == 0
    assert not cut.rows(
        theta, spoilt(list(range(9)))
    ).any()  # whether all are unusable is a fact about records too


def test_mistakes_in_the_call_are_refused_even_where_long_gradients_are_cut(silent):
    options = {"constraint": L2Ball(1.0), "lipschitz": 2.0, "dimension": 2, "clip": True, **BUDGET}
    for batch_size in (1, 5):
        with pytest.raises(
            ValueError, match=r"x must be a floating-point tensor of shape \(B, 2\)"
        ):
            solve(
                shuffle_sgd,
                absolute_loss,
                (torch.zeros(20, 3), torch.zeros(20)),
                batch_size=batch_size,
                **options,
            )


def test_messages_hold_no_numbers_of_records(silent):
    """How many records are unusable, and how long a gradient is, are exact facts about data."""
    records = torch.ones(7, 2, dtype=torch.float64)
    records[3] = math.nan
    with pytest.raises(ValueError, match="clip=True") as not_finite:
        BoundedGradients(
            Objective.from_loss(lambda t, x: (x @ t).sum(), dimension=2), 2.0, False
        ).rows(torch.ones(2), records)
    with pytest.raises(ValueError, match="clip=True") as too_long:
        BoundedGradients(
            Objective.from_loss(lambda t, x: 31.25 * (x @ t).sum(), dimension=2), 2.0, False
        ).rows(torch.ones(2), torch.ones(7, 2, dtype=torch.float64))
    for message in map(str, (not_finite.value, too_long.value)):
        assert not set("1345679") & set(message)
