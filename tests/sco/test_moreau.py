"""Moreau envelopes against closed forms and a general-purpose solver, and Lemma 4.6 of SCO as properties.

Solver: ``scipy.optimize`` (SLSQP) on the epigraph of a maximum of affine functions. Its ``ftol`` of 1e-12 on a β-strongly
convex function means a point within sqrt(2e-12/β) of the minimiser, 2.6e-6 for β ≥ 0.3; ``REFERENCE`` allows 1e-5.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from opacus_shuffle.sco.constraints import Box, L2Ball, as_constraint
from opacus_shuffle.sco.losses import LINKS, Link, absolute_loss, hinge_loss, logistic_loss
from opacus_shuffle.sco.module_objective import ModuleObjective
from opacus_shuffle.sco.moreau import MoreauEnvelope
from opacus_shuffle.sco.objective import LinearObjective, Objective
from opacus_shuffle.sco.proximal import by_contraction, by_cutting_planes, relative_error, steps_for

REFERENCE = 1e-5
# Values here are below 1e4 and are reached in fewer than 1e3 operations of relative error 2⁻⁵³.
ROUNDING = 1e-9


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labelled(users, dimension, seed=0):
    return normal(users, dimension, seed=seed), torch.sign(normal(users, seed=seed + 1))


def largest(theta, batch):
    """max_k ⟨a_k, θ⟩ + b_k, convex, as Lipschitz as the longest a_k."""
    slopes, offsets = batch
    return (slopes @ theta + offsets).max(dim=1).values


def pieces(users=4, count=6, dimension=3, seed=0):
    slopes = normal(users, count, dimension, seed=seed)
    return slopes / slopes.norm(dim=2, keepdim=True).clamp_min(1), normal(users, count, seed=seed + 1)


def reference_prox(slopes, offsets, theta, beta, *, radius=None):
    """The proximal point of one maximum of affine functions, within a ball about 0."""
    a, b, start = slopes.numpy(), offsets.numpy(), theta.numpy()
    conditions = [{"type": "ineq", "fun": lambda v: v[-1] - a @ v[:-1] - b, "jac": lambda v: np.c_[-a, np.ones(len(a))]}]
    if radius is not None:
        conditions.append(
            {"type": "ineq", "fun": lambda v: radius**2 - v[:-1] @ v[:-1], "jac": lambda v: np.append(-2 * v[:-1], 0.0)}
        )
    found = minimize(
        lambda v: v[-1] + beta / 2 * ((v[:-1] - start) ** 2).sum(),
        np.append(start, (a @ start + b).max()),
        jac=lambda v: np.append(beta * (v[:-1] - start), 1.0),
        constraints=conditions,
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 1000},
    )
    assert found.success, found.message
    return torch.from_numpy(found.x[:-1])


# ---- generalised linear losses --------------------------------------------------------------------------------------------


def huber(theta, batch, beta):
    """The envelope of |⟨θ, x⟩ − y|, in closed form."""
    x, y = batch
    residual, kappa = (x @ theta - y).abs(), x.square().sum(1) / beta
    return torch.where(residual <= kappa, residual**2 / (2 * kappa), residual - kappa / 2)


@pytest.mark.parametrize("beta", [1e-3, 1.0, 50.0, 1e6])
def test_the_envelope_of_the_absolute_loss_is_hubers_loss(beta):
    data, theta = (normal(200, 3), normal(200, seed=1)), normal(3, seed=2).requires_grad_()
    values = huber(theta, data, beta)
    rows = torch.stack([torch.autograd.grad(value, theta, retain_graph=True)[0] for value in values])
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
    # The root a of a − h′(s − κa) lies between any a′ and h′(s − κa′), and no farther than their distance, as h′ increases.
    scores = features @ theta
    residual = (coefficients - steepness(scores - squares / beta * coefficients, labels)).abs()
    slope = 1 + squares / beta * curvature(steepness, scores - squares / beta * coefficients, labels)
    # Newton's estimate of the distance to the root, against 2⁻⁴⁰ of the bracket and the rounding of the scores.
    assert bool((residual / slope <= 2.0**-40 * steepness(scores, labels).abs() + 1e-12 * (1 + scores.abs())).all())
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
    torch.testing.assert_close(exact.gradients(theta, data), bisected.gradients(theta, data), rtol=1e-12, atol=1e-13)


def test_scores_on_a_kink_and_records_without_features_are_fine():
    features = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    for name in LINKS:
        envelope = MoreauEnvelope.generalized_linear(name, 2.0, dimension=2)
        rows = envelope.gradients(torch.tensor([1.0, 5.0]), (features, torch.ones(3)))
        assert bool((rows[1] == 0).all())
        if name != "logistic":
            assert bool((rows == 0).all())  # margin or residual is exactly that of the minimum


@pytest.mark.parametrize("loss", [absolute_loss, hinge_loss])
def test_cutting_planes_agree_with_closed_forms(loss):
    data, theta = labelled(50, 3), normal(3, seed=2)
    bound = float(data[0].norm(dim=1).max())
    exact = MoreauEnvelope(Objective.from_loss(loss, dimension=3), 2.0, lipschitz=bound)
    general = MoreauEnvelope(Objective.from_loss(lambda *a: loss(*a), dimension=3), 2.0, lipschitz=bound, iterations=30)
    points = general.proximal_points(theta, data)
    distance = (points.points - exact.proximal_points(theta, data).points).norm(dim=1)
    assert bool((distance <= points.errors + ROUNDING).all())
    assert float(points.errors.max()) < 1e-6  # one kink: a few steps find it


# ---- general solvers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.3, 2.0, 40.0])
@pytest.mark.parametrize("radius", [None, 1.0])
def test_certified_errors_hold_against_a_general_purpose_solver(beta, radius):
    data, theta = pieces(), normal(3, seed=5)
    theta = theta if radius is None else L2Ball(radius).project(3 * theta)
    objective = Objective.from_loss(largest, dimension=3)
    true = torch.stack([reference_prox(a, b, theta, beta, radius=radius) for a, b in zip(*data, strict=True)])
    for relative in (0.5, 0.05, 0.01):
        envelope = MoreauEnvelope(
            objective,
            beta,
            lipschitz=1.0,
            constraint=None if radius is None else L2Ball(radius),
            accuracy=relative / beta,
        )
        found = envelope.proximal_points(theta, data)
        assert bool(((found.points - true).norm(dim=1) <= found.errors + REFERENCE).all())
        assert float(found.errors.max()) <= envelope.accuracy == pytest.approx(relative / beta)
        wrong = (envelope.gradients(theta, data) - beta * (theta - true)).norm(dim=1)
        assert float(wrong.max()) <= envelope.gradient_error + beta * REFERENCE
        assert radius is None or float(found.points.norm(dim=1).max()) <= radius * (1 + 1e-12)


def test_soft_thresholding_is_found_in_any_dimension():
    records, theta = 2 * normal(5, 8), normal(8, seed=3)
    envelope = MoreauEnvelope(
        Objective.from_loss(lambda t, x: (t - x).abs().sum(1), dimension=8), 2.0, lipschitz=math.sqrt(8), accuracy=0.02
    )
    offset = theta - records
    true = records + torch.sign(offset) * (offset.abs() - 0.5).clamp_min(0)
    found = envelope.proximal_points(theta, records)
    assert bool(((found.points - true).norm(dim=1) <= found.errors).all())
    assert float(found.errors.max()) <= 0.02


@given(dimension=st.integers(1, 12), count=st.integers(1, 12), beta=st.floats(1e-3, 1e3), seed=st.integers(0, 2**31))
@settings(max_examples=25, deadline=None)
def test_what_is_promised_beforehand_is_certified_afterwards(dimension, count, beta, seed):
    data = pieces(3, count, dimension, seed=seed)
    objective = Objective.from_loss(largest, dimension=dimension)
    theta = normal(dimension, seed=seed + 2).expand(3, dimension)
    for steps in (1, 17, 60):
        found = by_cutting_planes(objective, data, theta, beta=beta, lipschitz=1.0, steps=steps)
        assert float(found.errors.max()) * beta <= relative_error(steps, smooth_ratio=None) + math.sqrt(beta) * 1e-6


@pytest.mark.parametrize("dimension", [5, 300])
def test_what_is_promised_holds_for_the_hardest_losses(dimension):
    # max_i θ_i needs a subgradient for each coordinate: the worst case in the lower bounds for such methods.
    objective = Objective.from_loss(lambda t, x: (t + 0 * x).max(dim=1).values, dimension=dimension)
    records, theta = torch.zeros(1, dimension), torch.zeros(1, dimension, dtype=torch.float64)
    true = torch.full((dimension,), -1 / dimension, dtype=torch.float64)
    for steps in (20, 100, 400):
        found = by_cutting_planes(objective, records, theta, beta=1.0, lipschitz=1.0, steps=steps)
        assert float(found.errors) <= relative_error(steps, smooth_ratio=None)
        assert float((found.points[0] - true).norm()) <= float(found.errors) + ROUNDING


@pytest.mark.parametrize("beta", [0.05, 1.0, 30.0])
@pytest.mark.parametrize("relative", [1e-2, 1e-8])
def test_the_contraction_finds_the_proximal_points_of_smooth_losses(beta, relative):
    data, theta = labelled(20, 3), normal(3, seed=2)
    bound = float(data[0].norm(dim=1).max())
    exact = MoreauEnvelope.generalized_linear("logistic", beta, dimension=3)
    envelope = MoreauEnvelope(
        Objective.from_loss(lambda *a: logistic_loss(*a), dimension=3),
        beta,
        lipschitz=bound,
        inner_smoothness=bound**2 / 4,
        accuracy=relative * bound / beta,
    )
    found = envelope.proximal_points(theta, data)
    distance = (found.points - exact.proximal_points(theta, data).points).norm(dim=1)
    assert bool((distance <= found.errors).all())
    assert float(found.errors.max()) <= envelope.accuracy * (1 + 1e-6)
    error = (envelope.gradients(theta, data) - exact.gradients(theta, data)).norm(dim=1)
    assert float(error.max()) <= envelope.gradient_error * (1 + 1e-6)


@pytest.mark.parametrize(
    "constraint", [L2Ball(0.8), Box(-0.5, 0.5, dimension=3), as_constraint(L2Ball(0.8).project, diameter=1.6)]
)
def test_both_solvers_agree_within_a_constraint(constraint):
    data, theta = labelled(10, 3), constraint.project(normal(3, seed=2))
    bound = float(data[0].norm(dim=1).max())
    objective = Objective.from_loss(logistic_loss, dimension=3)
    smooth = MoreauEnvelope(
        objective, 0.3, lipschitz=bound, constraint=constraint, inner_smoothness=bound**2 / 4, accuracy=1e-9
    ).proximal_points(theta, data)
    rough = MoreauEnvelope(objective, 0.3, lipschitz=bound, constraint=constraint, accuracy=0.5).proximal_points(theta, data)
    assert bool(((smooth.points - rough.points).norm(dim=1) <= rough.errors + smooth.errors).all())
    # The proximal point of a constrained problem: no step within the set goes downhill.
    gradient = objective.gradients(smooth.points, data) + 0.3 * (smooth.points - theta)
    better = torch.stack([constraint.project(p - g) for p, g in zip(smooth.points, gradient, strict=True)])
    torch.testing.assert_close(better, smooth.points, rtol=0, atol=1e-7)


def test_steps_and_what_they_promise_are_inverse():
    for ratio in (None, 0.01, 1.0, 100.0):
        for relative in (0.9, 0.5, 0.1, 0.02):
            steps = steps_for(relative, smooth_ratio=ratio)
            assert relative_error(steps, smooth_ratio=ratio) <= relative * (1 + 1e-12)
            assert steps == 1 or relative_error(steps - 1, smooth_ratio=ratio) > relative


def test_iterations_are_as_many_as_asked_for_and_their_promise_holds():
    data, theta = pieces(), normal(3, seed=5)
    envelope = MoreauEnvelope(Objective.from_loss(largest, dimension=3), 1.0, lipschitz=1.0, iterations=40)
    assert envelope.gradient_error == pytest.approx(4 / math.sqrt(55))
    assert envelope.proximal_points(theta, data).steps == 41  # and the first cut
    true = torch.stack([reference_prox(a, b, theta, 1.0) for a, b in zip(*data, strict=True)])
    wrong = (envelope.gradients(theta, data) - (theta - true)).norm(dim=1)
    assert float(wrong.max()) <= envelope.gradient_error


def test_networks_in_single_precision_can_be_smoothed():
    torch.manual_seed(0)
    network = torch.nn.Linear(3, 1)
    objective = ModuleObjective(network, lambda output, label: (1 - label * output.squeeze(1)).clamp_min(0))
    features, labels = labelled(30, 3)
    bound = math.sqrt(float(features.norm(dim=1).max()) ** 2 + 1)
    envelope = MoreauEnvelope(objective, 2.0, lipschitz=bound, accuracy=0.05)
    exact = MoreauEnvelope.generalized_linear("hinge", 2.0, dimension=4)
    wanted = exact.gradients(objective.initial, (torch.cat([features, torch.ones(30, 1)], 1), labels))
    error = (envelope.gradients(objective.initial, (features, labels)) - wanted).norm(dim=1)
    assert float(error.max()) <= envelope.gradient_error


# ---- Lemma 4.6 ------------------------------------------------------------------------------------------------------------


def envelopes(beta, dimension, seed):
    """An exact envelope, a constrained smooth one and a constrained rough one, with losses, L, data and the set."""
    data = labelled(3, dimension, seed=seed)
    bound = float(data[0].norm(dim=1).max())
    kinks, smooth = (
        Objective.from_loss(hinge_loss, dimension=dimension),
        Objective.from_loss(logistic_loss, dimension=dimension),
    )
    ball, box = L2Ball(1.0), Box(-1.0, 1.0, dimension=dimension)
    yield MoreauEnvelope(kinks, beta, lipschitz=bound), bound, data, ball
    yield (
        MoreauEnvelope(
            smooth, beta, lipschitz=bound, constraint=ball, inner_smoothness=bound**2 / 4, accuracy=1e-7 * bound / beta
        ),
        bound,
        data,
        ball,
    )
    yield (
        MoreauEnvelope(
            Objective.from_loss(largest, dimension=dimension), beta, lipschitz=1.0, constraint=box, accuracy=0.1 / beta
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
        (first, slope), (second, other) = (envelope.losses_and_gradients(point, data) for point in (one, two))
        distance = float((one - two).norm())
        error = envelope.gradient_error
        # The value at a point r off the minimiser of an L-Lipschitz function plus (β/2)‖·‖², where β‖θ − p‖ ≤ L.
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
        assert bool((loss <= first + envelope.approximation_error + ROUNDING).all())


def test_gradients_are_those_of_the_values():
    data, theta = labelled(8, 3), normal(3, seed=2)
    envelope = MoreauEnvelope.generalized_linear("logistic", 0.7, dimension=3)
    gradients, step = envelope.gradients(theta, data), 1e-5
    for j in range(3):
        shift = torch.zeros(3, dtype=torch.float64)
        shift[j] = step
        slope = (envelope.losses(theta + shift, data) - envelope.losses(theta - shift, data)) / (2 * step)
        # Third derivatives are at most ‖x‖³ < 100 and the values are right to 1e-14: 1e-10·100/6 + 1e-14/1e-5.
        torch.testing.assert_close(slope, gradients[:, j], rtol=0, atol=1e-8)


def test_chunks_points_of_their_own_and_nothing_at_all():
    data, points = pieces(7), normal(7, 3, seed=5)
    make = lambda size: MoreauEnvelope(  # noqa: E731
        Objective.from_loss(largest, dimension=3), 1.0, lipschitz=1.0, iterations=20, chunk_size=size
    )
    torch.testing.assert_close(make(2).gradients(points, data), make(100).gradients(points, data))
    for i in range(7):
        row = make(100).gradients(points[i], (data[0][i : i + 1], data[1][i : i + 1]))
        torch.testing.assert_close(row, make(100).gradients(points, data)[i : i + 1])
    assert make(2).gradients(points[0], (data[0][:0], data[1][:0])).shape == (0, 3)
    assert make(2).proximal_points(points[0], (data[0][:0], data[1][:0])).points.shape == (0, 3)


def test_a_solver_of_ones_own_is_used():
    records, theta = normal(5, 2), normal(2, seed=1)

    def soft(points, x):
        offset = points - x
        return x + torch.sign(offset) * (offset.abs() - 0.5).clamp_min(0)

    objective = Objective.from_loss(lambda t, x: (t - x).abs().sum(1), dimension=2)
    envelope = MoreauEnvelope(objective, 2.0, prox=soft)
    torch.testing.assert_close(envelope.gradients(theta, records), (2 * (theta - records)).clamp(-1, 1))
    assert envelope.gradient_error == 0
    assert envelope.lipschitz is envelope.approximation_error is None
    assert MoreauEnvelope(objective, 2.0, prox=soft, accuracy=0.1).gradient_error == 0.2


KINK = Objective.from_loss(lambda t, x: (t - x).abs().sum(1), dimension=1)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: MoreauEnvelope(absolute_loss, 1.0), "objective must be"),
        (lambda: MoreauEnvelope(KINK, 0.0, lipschitz=1.0), "smoothness must be positive"),
        (lambda: MoreauEnvelope(KINK, 1.0), "lipschitz must be given"),
        (
            lambda: MoreauEnvelope(LinearObjective(LINKS["hinge"], dimension=1), 1.0, constraint=L2Ball(1.0)),
            "lipschitz must be given",
        ),
        (lambda: MoreauEnvelope(KINK, 1.0, lipschitz=1.0, accuracy=0.1, iterations=3), "cannot both"),
        (lambda: MoreauEnvelope(KINK, 1.0, lipschitz=1.0, accuracy=1e-6), "must not need more than 1000000 steps"),
        (lambda: MoreauEnvelope(KINK, 1.0, lipschitz=1.0, iterations=0), "iterations"),
        (lambda: MoreauEnvelope(KINK, 1.0, prox=3), "prox must be a callable"),
        (lambda: MoreauEnvelope(KINK, 1.0, prox=KINK.losses, iterations=3), "iterations cannot"),
        (
            lambda: MoreauEnvelope(KINK, 1.0, prox=lambda t, x: t[0]).gradients(torch.zeros(1), torch.zeros(3, 1)),
            "prox must return",
        ),
        (lambda: MoreauEnvelope(KINK, 1.0, prox=KINK.losses, accuracy=-1.0), "accuracy must not be negative"),
        (lambda: MoreauEnvelope(KINK, 1.0, lipschitz=0.5).gradients(torch.zeros(1), torch.ones(3, 1)), "lipschitz must bound"),
        (
            lambda: MoreauEnvelope(KINK, 1.0, lipschitz=1.0, constraint=L2Ball(1.0)).gradients(
                2 * torch.ones(1), torch.ones(3, 1)
            ),
            "theta must lie",
        ),
        (
            lambda: MoreauEnvelope(
                Objective.from_loss(lambda t, x: -(1 + (t - x) ** 2).sqrt().sum(1), dimension=1), 0.1, lipschitz=1.0
            ).gradients(torch.full((1,), 0.5), torch.zeros(1, 1)),
            "convex",
        ),
        (lambda: MoreauEnvelope.generalized_linear("cauchy", 1.0, dimension=2), "link must be one of"),
        (
            lambda: MoreauEnvelope.generalized_linear("hinge", 1.0, dimension=1).gradients(torch.zeros(1), torch.zeros(3, 1)),
            "pair",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(act, message):
    with pytest.raises(ValueError, match=message):
        act()


def test_the_contraction_refuses_longer_gradients():
    objective = Objective.from_loss(lambda t, x: (t - x).square().sum(1) / 2, dimension=1)
    with pytest.raises(ValueError, match="norm 3"):
        by_contraction(objective, torch.full((2, 1), 3.0), torch.zeros(2, 1), beta=1.0, smoothness=1.0, lipschitz=2.0, steps=3)


# ---- one record's report tells nothing of another's -----------------------------------------------------------------------


def solvers():
    """Every way to proximal points: an envelope and the records it takes."""
    data = labelled(6, 3)
    bound = 2 * float(data[0].norm(dim=1).max())
    general = Objective.from_loss(lambda *a: logistic_loss(*a), dimension=3)
    smooth = {"lipschitz": bound, "inner_smoothness": bound**2 / 4}

    def soft(points, batch):
        offset = points - batch[0]
        return batch[0] + torch.sign(offset) * (offset.abs() - 0.5).clamp_min(0)

    def soft_by_values(points, batch):
        return points if float(batch[1].sum()) > 5 else soft(points, batch)

    def mixing(points, batch):
        return points - batch[0].sum(dim=0)

    def mixing_link(scores, labels):
        return torch.logaddexp(-labels * scores, torch.zeros(())) * labels.abs().sum()

    def make_link(**options):
        return LinearObjective(Link("mixing", mixing_link, **options), dimension=3)

    return {
        "contraction": (MoreauEnvelope(general, 0.3, accuracy=1e-3, **smooth), data),
        "contraction within": (MoreauEnvelope(general, 0.3, constraint=L2Ball(5.0), accuracy=1e-3, **smooth), data),
        "cuts": (MoreauEnvelope(Objective.from_loss(largest, dimension=3), 1.0, lipschitz=1.0, accuracy=0.1), pieces(6)),
        "cuts, so many": (
            MoreauEnvelope(Objective.from_loss(largest, dimension=3), 1.0, lipschitz=1.0, iterations=9),
            pieces(6),
        ),
        "closed form": (MoreauEnvelope.generalized_linear("hinge", 2.0, dimension=3), data),
        "bisection": (MoreauEnvelope.generalized_linear("logistic", 2.0, dimension=3), data),
        "own link": (MoreauEnvelope(make_link(), 2.0), data),
        "own derivative": (MoreauEnvelope(make_link(derivative=lambda s, y: s - y.sum()), 2.0), data),
        "own coefficient": (MoreauEnvelope(make_link(coefficient=lambda s, y, k: s.mean() * y * k), 2.0), data),
        "own prox": (MoreauEnvelope(general, 2.0, prox=soft), data),
        "own prox that mixes": (MoreauEnvelope(general, 2.0, prox=mixing), data),
        "own slow prox": (MoreauEnvelope(general, 2.0, prox=soft_by_values), data),
    }


@pytest.mark.filterwarnings("ignore:prox cannot be vectorised")
@pytest.mark.parametrize("name", solvers())
def test_what_a_record_reports_depends_on_no_other_record_to_the_last_bit(name):
    envelope, data = solvers()[name]
    theta = 0.5 * normal(3, seed=7)
    rows = envelope.gradients(theta, data)
    for other in range(6):
        for factor in (0.0, 1.7) if "cut" not in name else (0.0, -0.9):
            # The features alone: labels are to stay signs; 1.7 times them is within L, and 0.9 times the slopes.
            changed = (data[0].clone(), data[1])
            changed[0][other] *= factor
            found = envelope.gradients(theta, changed)
            rest = torch.arange(6) != other
            assert torch.equal(found[rest], rows[rest])
            alone = envelope.gradients(theta, (changed[0][other : other + 1], changed[1][other : other + 1]))
            torch.testing.assert_close(found[other : other + 1], alone, rtol=1e-9, atol=1e-9)


def test_records_leave_off_at_different_steps_and_not_together():
    """Else the property above would be empty for the solvers that stop early."""
    data = labelled(6, 3)
    data[0][0] = 0.0
    objective = Objective.from_loss(logistic_loss, dimension=3)
    options = {"beta": 0.3, "smoothness": 9.0, "lipschitz": 6.0, "steps": 300}
    theta = 0.5 * normal(3, seed=7).expand(6, 3)
    found = by_contraction(objective, data, theta, tolerance=1e-3, **options)
    longer = by_contraction(objective, data, theta, **options)
    assert 1 < found.steps < longer.steps
    assert bool((found.errors <= 1e-3).all())
    used = []
    for i in range(6):
        record = (data[0][i : i + 1], data[1][i : i + 1])
        used.append(by_contraction(objective, record, theta[i : i + 1], tolerance=1e-3, **options).steps)
    assert min(used) == 1 < max(used) == found.steps


def test_a_promise_lets_a_solver_of_ones_own_have_whole_batches():
    sizes = []

    def prox(points, batch):
        sizes.append(len(points))
        return points

    for promise, wanted in ((True, [5]), (False, [1])):  # vectorised: one call, on what looks like a batch of one
        sizes.clear()
        MoreauEnvelope(KINK, 1.0, prox=prox, prox_elementwise=promise).gradients(torch.zeros(1), torch.zeros(5, 1))
        assert sizes == wanted
    with pytest.raises(ValueError, match="prox_elementwise must be True or False"):
        MoreauEnvelope(KINK, 1.0, prox=prox, prox_elementwise=1)
    with pytest.raises(ValueError, match="random numbers"):
        MoreauEnvelope(KINK, 1.0, prox=lambda t, x: t + torch.rand(1)).gradients(torch.zeros(1), torch.zeros(5, 1))
    with pytest.warns(UserWarning, match="prox cannot be vectorised.*prox_elementwise=True"):
        MoreauEnvelope(KINK, 1.0, prox=lambda t, x: t + float(x.sum())).gradients(torch.zeros(1), torch.zeros(5, 1))
