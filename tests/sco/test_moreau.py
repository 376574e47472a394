"""Moreau envelopes against closed forms, and Lemma 4.6 of SCO as properties."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.convex_problems import labelled, largest, normal, pieces
from hypothesis import given, settings
from hypothesis import strategies as st

from opacus_shuffle.sco import (
    Box,
    L2Ball,
    LinearObjective,
    Link,
    ModuleObjective,
    MoreauEnvelope,
    Objective,
    absolute_loss,
    hinge_loss,
    logistic_loss,
)
from opacus_shuffle.sco.losses import LINKS

# Values here are below 1e4 and are reached in fewer than 1e3 operations of relative error 2⁻⁵³.
ROUNDING = 1e-9


def huber(theta, batch, beta):
    """The envelope of |⟨θ, x⟩ − y|, in closed form."""
    x, y = batch
    residual, kappa = (x @ theta - y).abs(), x.square().sum(1) / beta
    return torch.where(residual <= kappa, residual**2 / (2 * kappa), residual - kappa / 2)


@pytest.mark.parametrize("beta", [1e-3, 1.0, 50.0, 1e6])
def test_the_envelope_of_the_absolute_loss_is_hubers_loss(beta):
    data, theta = (normal(200, 3), normal(200, seed=1)), normal(3, seed=2).requires_grad_()
    values = huber(theta, data, beta)
    rows = torch.stack(
        [torch.autograd.grad(value, theta, retain_graph=True)[0] for value in values]
    )
    envelope = MoreauEnvelope(Objective.from_loss(absolute_loss, dimension=3), beta)
    torch.testing.assert_close(envelope.gradients(theta, data), rows, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(envelope.losses(theta, data), values.detach(), rtol=1e-9, atol=1e-9)
    assert envelope.gradient_error == envelope.accuracy == 0


LINKS_BY_FUNCTION = {
    "logistic": "logistic",
    "fourth power": lambda s, y: (s - y) ** 4,
    "soft plus minus": lambda s, y: torch.logaddexp(s - y, y - s),
    "huge slope": lambda s, y: 1e6 * torch.logaddexp(s - y, y - s),
}


@pytest.mark.parametrize("link", LINKS_BY_FUNCTION)
@pytest.mark.parametrize("beta", [0.1, 10.0])
def test_bisection_solves_the_condition_of_the_proximal_point_to_the_last_digits(link, beta):
    features, labels = labelled(300, 3)
    theta = normal(3, seed=2)
    envelope = MoreauEnvelope.generalized_linear(LINKS_BY_FUNCTION[link], beta, dimension=3)
    gradients = envelope.gradients(theta, (features, labels))
    steepness = envelope.objective.link.derivative
    squares = features.square().sum(1)
    coefficients = (gradients * features).sum(1) / squares
    # The root a of a − h′(s − κa) lies between any a′ and h′(s − κa′), and no farther than their
    # distance, as h′ increases.
    scores = features @ theta
    residual = (coefficients - steepness(scores - squares / beta * coefficients, labels)).abs()
    slope = 1 + squares / beta * curvature(
        steepness, scores - squares / beta * coefficients, labels
    )
    # Newton's estimate of the distance to the root, against 2⁻⁴⁰ of the bracket and the rounding of
    # the scores.
    assert bool(
        (
            residual / slope
            <= 2.0**-40 * steepness(scores, labels).abs() + 1e-12 * (1 + scores.abs())
        ).all()
    )
    torch.testing.assert_close(gradients, coefficients[:, None] * features, rtol=1e-12, atol=1e-12)


def curvature(steepness, scores, labels):
    """h″, by autograd where there is some, else by differences."""
    step = 1e-6 * (1 + scores.abs())
    return (steepness(scores + step, labels) - steepness(scores - step, labels)) / (2 * step)


@pytest.mark.parametrize("name", ["absolute", "hinge", "squared"])
def test_closed_forms_agree_with_bisection(name):
    data, theta, link = labelled(500, 2), normal(2, seed=3), LINKS[name]
    exact = MoreauEnvelope.generalized_linear(name, 3.0, dimension=2)
    bisected = MoreauEnvelope.generalized_linear(lambda s, y: link.value(s, y), 3.0, dimension=2)
    torch.testing.assert_close(
        exact.gradients(theta, data), bisected.gradients(theta, data), rtol=1e-12, atol=1e-13
    )


def test_scores_on_a_kink_and_records_without_features_are_fine():
    features = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    for name in LINKS:
        envelope = MoreauEnvelope.generalized_linear(name, 2.0, dimension=2)
        rows = envelope.gradients(torch.tensor([1.0, 5.0]), (features, torch.ones(3)))
        assert bool((rows[1] == 0).all())
        if name != "logistic":
            assert bool((rows == 0).all())  # margin or residual is exactly that of the minimum


def test_networks_in_single_precision_can_be_smoothed():
    torch.manual_seed(0)
    network = torch.nn.Linear(3, 1)
    objective = ModuleObjective(
        network, lambda output, label: (1 - label * output.squeeze(1)).clamp_min(0)
    )
    features, labels = labelled(30, 3)
    bound = math.sqrt(float(features.norm(dim=1).max()) ** 2 + 1)
    envelope = MoreauEnvelope(objective, 2.0, lipschitz=bound, accuracy=0.05)
    exact = MoreauEnvelope.generalized_linear("hinge", 2.0, dimension=4)
    wanted = exact.gradients(
        objective.initial, (torch.cat([features, torch.ones(30, 1)], 1), labels)
    )
    error = (envelope.gradients(objective.initial, (features, labels)) - wanted).norm(dim=1)
    assert float(error.max()) <= envelope.gradient_error


def envelopes(beta, dimension, seed):
    """An exact envelope and a constrained rough one, with losses, L, data and the set."""
    data = labelled(3, dimension, seed=seed)
    bound = float(data[0].norm(dim=1).max())
    ball, box = L2Ball(1.0), Box(-1.0, 1.0, dimension=dimension)
    yield (
        MoreauEnvelope(Objective.from_loss(hinge_loss, dimension=dimension), beta, lipschitz=bound),
        bound,
        data,
        ball,
    )
    yield (
        MoreauEnvelope(
            Objective.from_loss(largest, dimension=dimension),
            beta,
            lipschitz=1.0,
            constraint=box,
            accuracy=0.1 / beta,
        ),
        1.0,
        pieces(3, 4, dimension, seed=seed),
        box,
    )


@given(beta=st.floats(0.05, 50), dimension=st.integers(1, 4), seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_lemma_4_6_holds_and_with_l_in_place_of_2l(beta, dimension, seed):
    for envelope, bound, data, region in envelopes(beta, dimension, seed):
        one, two = (region.project(2 * normal(dimension, seed=seed + k)) for k in (5, 6))
        (first, slope), (second, other) = (
            envelope.losses_and_gradients(point, data) for point in (one, two)
        )
        distance = float((one - two).norm())
        error = envelope.gradient_error
        # The value at a point r off the minimiser of an L-Lipschitz function plus (β/2)‖·‖², where
        # β‖θ − p‖ ≤ L.
        excess = 2 * bound * envelope.accuracy + beta / 2 * envelope.accuracy**2 + ROUNDING
        # 1. Convex, L-Lipschitz, β-smooth.
        tangent = second + (other * (one - two)).sum(1)
        assert bool((first >= tangent - error * distance - excess).all())
        assert bool(((first - second).abs() <= bound * distance + excess).all())
        assert float((slope - other).norm(dim=1).max()) <= beta * distance + 2 * error + ROUNDING
        points = envelope.proximal_points(one, data).points
        assert float((one - points).norm(dim=1).max()) * beta <= bound + error + ROUNDING
        assert float(slope.norm(dim=1).max()) <= bound * (1 + 1e-12)
        # 3. The sandwich; 2. is what the gradients are tested against everywhere here.
        loss = envelope.objective.losses(one, data)
        assert bool((first <= loss + excess).all())
        assert bool((loss <= first + bound**2 / (2 * beta) + ROUNDING).all())


def test_chunks_points_of_their_own_and_nothing_at_all():
    data, points = pieces(7), normal(7, 3, seed=5)
    objective = Objective.from_loss(largest, dimension=3)
    whole = MoreauEnvelope(objective, 1.0, lipschitz=1.0, accuracy=0.1)
    parts = MoreauEnvelope(objective, 1.0, lipschitz=1.0, accuracy=0.1)
    parts.chunk_size = 2
    rows = whole.gradients(points, data)
    torch.testing.assert_close(parts.gradients(points, data), rows)
    for i in range(7):
        alone = whole.gradients(points[i], (data[0][i : i + 1], data[1][i : i + 1]))
        torch.testing.assert_close(alone, rows[i : i + 1])
    nobody = (data[0][:0], data[1][:0])
    assert (
        whole.gradients(points[0], nobody).shape
        == whole.proximal_points(points[0], nobody).points.shape
        == (0, 3)
    )


def test_a_solver_of_ones_own_is_used():
    records, theta = normal(5, 2), normal(2, seed=1)

    def soft(points, x):
        offset = points - x
        return x + torch.sign(offset) * (offset.abs() - 0.5).clamp_min(0)

    objective = Objective.from_loss(lambda t, x: (t - x).abs().sum(1), dimension=2)
    envelope = MoreauEnvelope(objective, 2.0, prox=soft)
    torch.testing.assert_close(
        envelope.gradients(theta, records), (2 * (theta - records)).clamp(-1, 1)
    )
    assert envelope.gradient_error == 0
    assert envelope.lipschitz is None
    assert MoreauEnvelope(objective, 2.0, prox=soft, accuracy=0.1).gradient_error == 0.2


KINK = Objective.from_loss(lambda t, x: (t - x).abs().sum(1), dimension=1)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: MoreauEnvelope(absolute_loss, 1.0), "objective must be"),
        (lambda: MoreauEnvelope(KINK, 0.0, lipschitz=1.0), "smoothness must be positive"),
        (lambda: MoreauEnvelope(KINK, 1.0), "lipschitz must be given"),
        (
            lambda: MoreauEnvelope(
                LinearObjective(LINKS["hinge"], dimension=1), 1.0, constraint=L2Ball(1.0)
            ),
            "lipschitz must be given",
        ),
        (
            lambda: MoreauEnvelope(KINK, 1.0, lipschitz=1.0, accuracy=1e-6),
            "must not need more than 1000000 steps",
        ),
        (lambda: MoreauEnvelope(KINK, 1.0, prox=3), "prox must be a callable"),
        (
            lambda: MoreauEnvelope(KINK, 1.0, prox=KINK.losses, prox_elementwise=1),
            "prox_elementwise must be True or False",
        ),
        (
            lambda: MoreauEnvelope(KINK, 1.0, prox=lambda t, x: t + torch.rand(1)).gradients(
                torch.zeros(1), torch.zeros(5, 1)
            ),
            "random numbers",
        ),
        (
            lambda: MoreauEnvelope(KINK, 1.0, prox=lambda t, x: t + float(x.sum())).gradients(
                torch.zeros(1), torch.zeros(5, 1)
            ),
            r"prox must run under .*prox_elementwise=True",
        ),
        (
            lambda: MoreauEnvelope(KINK, 1.0, prox=lambda t, x: t[0]).gradients(
                torch.zeros(1), torch.zeros(3, 1)
            ),
            "prox must return",
        ),
        (
            lambda: MoreauEnvelope(KINK, 1.0, prox=KINK.losses, accuracy=-1.0),
            "accuracy must not be negative",
        ),
        (
            lambda: MoreauEnvelope(KINK, 1.0, lipschitz=0.5).gradients(
                torch.zeros(1), torch.ones(3, 1)
            ),
            "lipschitz must bound",
        ),
        (
            lambda: MoreauEnvelope(KINK, 1.0, lipschitz=1.0, constraint=L2Ball(1.0)).gradients(
                2 * torch.ones(1), torch.ones(3, 1)
            ),
            "theta must lie",
        ),
        (
            lambda: MoreauEnvelope(
                Objective.from_loss(lambda t, x: -(1 + (t - x) ** 2).sqrt().sum(1), dimension=1),
                0.1,
                lipschitz=1.0,
            ).gradients(torch.full((1,), 0.5), torch.zeros(1, 1)),
            "convex",
        ),
        (
            lambda: MoreauEnvelope.generalized_linear("cauchy", 1.0, dimension=2),
            "link must be one of",
        ),
        (
            lambda: MoreauEnvelope.generalized_linear("hinge", 1.0, dimension=1).gradients(
                torch.zeros(1), torch.zeros(3, 1)
            ),
            "pair",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(act, message):
    with pytest.raises(ValueError, match=message):
        act()


def solvers():
    """Every way to proximal points: an envelope and the records it takes."""
    data = labelled(6, 3)
    bound = 2 * float(data[0].norm(dim=1).max())
    general = Objective.from_loss(lambda *a: logistic_loss(*a), dimension=3)

    def soft(points, batch):
        offset = points - batch[0]
        return batch[0] + torch.sign(offset) * (offset.abs() - 0.5).clamp_min(0)

    def mixing(points, batch):
        return points - batch[0].sum(dim=0)

    def mixing_link(scores, labels):
        return torch.logaddexp(-labels * scores, torch.zeros(())) * labels.abs().sum()

    def make_link(**options):
        return LinearObjective(Link("mixing", mixing_link, **options), dimension=3)

    return {
        "cuts within": (
            MoreauEnvelope(general, 3.0, lipschitz=bound, constraint=L2Ball(5.0)),
            data,
        ),
        "cuts": (
            MoreauEnvelope(
                Objective.from_loss(largest, dimension=3), 1.0, lipschitz=1.0, accuracy=0.1
            ),
            pieces(6),
        ),
        "closed form": (MoreauEnvelope.generalized_linear("hinge", 2.0, dimension=3), data),
        "bisection": (MoreauEnvelope.generalized_linear("logistic", 2.0, dimension=3), data),
        "own link": (MoreauEnvelope(make_link(), 2.0), data),
        "own derivative": (
            MoreauEnvelope(make_link(derivative=lambda s, y: s - y.sum()), 2.0),
            data,
        ),
        "own coefficient": (
            MoreauEnvelope(make_link(coefficient=lambda s, y, k: s.mean() * y * k), 2.0),
            data,
        ),
        "own prox": (MoreauEnvelope(general, 2.0, prox=soft), data),
        "own prox that mixes": (MoreauEnvelope(general, 2.0, prox=mixing), data),
    }


@pytest.mark.parametrize("name", solvers())
def test_what_a_record_reports_depends_on_no_other_record_to_the_last_bit(name):
    envelope, data = solvers()[name]
    theta = 0.5 * normal(3, seed=7)
    rows = envelope.gradients(theta, data)
    for other in range(6):
        for factor in (0.0, 1.7) if name != "cuts" else (0.0, -0.9):
            # The features alone: labels are to stay signs; 1.7 times them is within L, and 0.9
            # times the slopes.
            changed = (data[0].clone(), data[1])
            changed[0][other] *= factor
            found = envelope.gradients(theta, changed)
            rest = torch.arange(6) != other
            assert torch.equal(found[rest], rows[rest])
            alone = envelope.gradients(
                theta, (changed[0][other : other + 1], changed[1][other : other + 1])
            )
            torch.testing.assert_close(found[other : other + 1], alone, rtol=1e-9, atol=1e-9)


def test_a_promise_lets_a_solver_of_ones_own_have_whole_batches():
    sizes = []

    def prox(points, batch):
        sizes.append(len(points))
        return points

    for promise in (True, False):  # vectorised: one call, on what looks like a batch of one
        MoreauEnvelope(KINK, 1.0, prox=prox, prox_elementwise=promise).gradients(
            torch.zeros(1), torch.zeros(5, 1)
        )
    assert sizes == [5, 1]
