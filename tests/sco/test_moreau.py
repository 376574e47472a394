"""Moreau envelopes against closed forms, and SCO's Lemma 4.6; docs/proofs/22."""

import pytest
import torch
from helpers.convex_problems import labelled, normal
from hypothesis import given
from hypothesis import strategies as st

from opacus_shuffle.sco import (
    MoreauEnvelope,
    Objective,
    absolute_loss,
    hinge_loss,
    logistic_loss,
    squared_loss,
)

# Values here are below 1e4 and are reached in fewer than 1e3 operations of relative error 2⁻⁵³.
ROUNDING = 1e-9


def from_loss(loss, dimension):
    return Objective.from_loss(loss, dimension=dimension)


# ---- losses of a linear score


def huber(theta, batch, beta):
    """The envelope of |⟨θ, x⟩ − y|, in closed form."""
    x, y = batch
    residual, kappa = (x @ theta - y).abs(), x.square().sum(1) / beta
    return torch.where(residual <= kappa, residual**2 / (2 * kappa), residual - kappa / 2)


# SCO Definition 4.5.
@pytest.mark.parametrize("beta", [1e-3, 1.0, 50.0, 1e6])
def test_the_envelope_of_the_absolute_loss_is_hubers_loss(beta):
    data, theta = (normal(200, 3), normal(200, seed=1)), normal(3, seed=2)
    rows = torch.func.jacrev(huber)(theta, data, beta)
    envelope = MoreauEnvelope(from_loss(absolute_loss, 3), beta)
    torch.testing.assert_close(envelope.gradients(theta, data), rows, rtol=1e-10, atol=1e-12)
    values = huber(theta, data, beta)
    torch.testing.assert_close(envelope.losses(theta, data), values, rtol=1e-9, atol=1e-9)
    assert envelope.smoothing_cost(3.0) == 9 / (2 * beta)


@pytest.mark.parametrize("loss", [logistic_loss, absolute_loss, hinge_loss, squared_loss])
@pytest.mark.parametrize("beta", [0.1, 10.0])
def test_the_gradient_is_the_losss_own_at_the_proximal_point(loss, beta):
    """a ∈ ∂h(s − κa), to the last digits: between h′ just below and just above that score."""
    (features, labels), theta = labelled(300, 3), normal(3, seed=2)
    envelope = MoreauEnvelope(from_loss(loss, 3), beta)
    gradients = envelope.gradients(theta, (features, labels))
    squares = features.square().sum(1)
    a = (gradients * features).sum(1) / squares
    torch.testing.assert_close(gradients, a[:, None] * features, rtol=1e-12, atol=1e-12)
    score = features @ theta - squares / beta * a
    step = 1e-10 * (1 + squares / beta)
    low, high = (loss.link.derivative(score + way * step, labels) for way in (-1, 1))
    assert bool(((low - 1e-12 <= a) & (a <= high + 1e-12)).all())


def test_scores_on_a_kink_and_records_without_features_are_fine():
    features = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    for loss in (absolute_loss, hinge_loss, squared_loss, logistic_loss):
        envelope = MoreauEnvelope(from_loss(loss, 2), 2.0)
        rows = envelope.gradients(torch.tensor([1.0, 5.0]), (features, torch.ones(3)))
        assert bool((rows[1] == 0).all())
        # Margin or residual is exactly that of the minimum.
        assert loss is logistic_loss or bool((rows == 0).all())


# ---- Lemma 4.6


# SCO Lemma 4.6.
@given(
    loss=st.sampled_from([logistic_loss, absolute_loss, hinge_loss]),
    beta=st.floats(0.05, 50),
    dimension=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_lemma_4_6_holds_and_with_l_in_place_of_2l(loss, beta, dimension, seed):
    data = labelled(3, dimension, seed=seed)
    bound = float(data[0].norm(dim=1).max())
    envelope = MoreauEnvelope(from_loss(loss, dimension), beta)
    one, two = (2 * normal(dimension, seed=seed + k) for k in (5, 6))
    first, slope = envelope.losses_and_gradients(one, data)
    second, other = envelope.losses_and_gradients(two, data)
    distance = float((one - two).norm())
    # 1. Convex, L-Lipschitz, β-smooth.
    assert bool((first >= second + (other * (one - two)).sum(1) - ROUNDING).all())
    assert bool(((first - second).abs() <= bound * distance + ROUNDING).all())
    assert float((slope - other).norm(dim=1).max()) <= beta * distance + ROUNDING
    assert float(slope.norm(dim=1).max()) <= bound * (1 + 1e-12)
    # 3. The sandwich; 2. is what the gradients are tested against everywhere here.
    loss_itself = envelope.objective.losses(one, data)
    assert bool((first <= loss_itself + ROUNDING).all())
    assert bool((loss_itself <= first + bound**2 / (2 * beta) + ROUNDING).all())


class OwnEnvelope(MoreauEnvelope):
    """The envelope of the absolute loss, by proximal points in closed form."""

    def proximal_points(self, theta, batch):
        x, y = batch
        residual, kappa = (x * theta).sum(1) - y, x.square().sum(1) / self.smoothness
        return theta - (residual / kappa).clamp(-1, 1)[:, None] * x / self.smoothness


def test_an_envelope_of_one_s_own_gives_the_same_as_the_library_s():
    data, theta = labelled(20, 3), normal(3, seed=7)
    own = OwnEnvelope(from_loss(lambda t, batch: absolute_loss(t, batch), 3), 2.0)
    expected = MoreauEnvelope(from_loss(absolute_loss, 3), 2.0).losses_and_gradients(theta, data)
    torch.testing.assert_close(own.losses_and_gradients(theta, data), expected)


@pytest.mark.parametrize("loss", [hinge_loss, logistic_loss], ids=["closed form", "bisection"])
def test_what_a_record_reports_depends_on_no_other_record_to_the_last_bit(loss):
    envelope, data = MoreauEnvelope(from_loss(loss, 3), 2.0), labelled(6, 3)
    theta = 0.5 * normal(3, seed=7)
    rows = envelope.gradients(theta, data)
    for other in range(6):
        for factor in (0.0, 1.7):  # of the features alone: labels are to stay signs
            changed = (data[0].clone(), data[1])
            changed[0][other] *= factor
            found = envelope.gradients(theta, changed)
            rest = torch.arange(6) != other
            assert torch.equal(found[rest], rows[rest])
            alone = envelope.gradients(theta, tuple(x[other : other + 1] for x in changed))
            torch.testing.assert_close(found[other : other + 1], alone, rtol=1e-9, atol=1e-9)
