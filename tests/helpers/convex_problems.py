"""Small convex problems, and one call that gives every option to the record it belongs to."""

import inspect

import numpy as np
import torch
from scipy.optimize import minimize

from opacus_shuffle.sco import L2Ball, Objective, PrivacyBudget, Problem
from opacus_shuffle.sco.records import number_of_users, take

BUDGET = {"epsilon": 1.0, "delta": 1e-6}


def solve(run, loss, data, **options):
    """``run(Problem(loss, data, ...), PrivacyBudget(...), ...)``."""
    own, parts = options, []
    for record in (Problem, PrivacyBudget):
        names = set(inspect.signature(record).parameters)
        parts.append({name: value for name, value in own.items() if name in names})
        own = {name: value for name, value in own.items() if name not in names}
    return run(Problem(loss, data, **parts[0]), PrivacyBudget(**parts[1]), **own)


def half_square(theta, batch):
    return (batch - theta).square().sum(1) / 2


class Quadratic(Objective):
    """``half_square`` by hand, for the sake of speed."""

    def __init__(self, dimension):
        self.dimension = dimension

    def _evaluate(self, theta, batch):
        return half_square(theta, batch), theta - batch


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def logistic_data(users, seed=0):
    features = torch.randn(users, 3, generator=seeded(seed), dtype=torch.float64)
    features = features / features.norm(dim=1, keepdim=True)
    labels = torch.where(
        features[:, 0] + 0.3 * torch.randn(users, generator=seeded(seed + 1)) > 0, 1.0, -1.0
    )
    return features, labels.to(torch.float64)


def best_in_ball(loss, data, dimension, radius):
    """The mean loss's least value in a ball about 0, and where, by scipy."""

    def value(point):
        theta = torch.tensor(point, requires_grad=True)
        mean = loss(theta, data).mean()
        (gradient,) = torch.autograd.grad(mean, theta)
        return float(mean.detach()), gradient.numpy()

    ball = {"type": "ineq", "fun": lambda x: radius**2 - x @ x, "jac": lambda x: -2 * x}
    found = minimize(
        value,
        np.zeros(dimension),
        jac=True,
        constraints=[ball],
        method="SLSQP",
        options={"ftol": 1e-14},
    )
    return found.fun, torch.tensor(found.x)


def mean_excesses(run, seeds, users=600, **options):
    """Excess population losses of E‖X − θ‖²/2 over fresh users and fresh noise, and the bound."""
    mean, excesses, bound = torch.tensor([0.4, -0.3, 0.2], dtype=torch.float64), [], None
    for seed in range(seeds):
        data = mean + 0.2 * (
            2 * torch.rand(users, 3, generator=seeded(seed), dtype=torch.float64) - 1
        )
        common = {
            "constraint": L2Ball(1.0),
            "lipschitz": 1.8,
            "generator": seeded(1000 + seed),
            **BUDGET,
        }
        estimate = solve(run, Quadratic(3), data, **{**common, **options})
        excesses.append(float((estimate.theta - mean).square().sum()) / 2)
        bound = estimate.excess_loss_bound
    return np.array(excesses), bound


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def labelled(users, dimension, seed=0):
    return normal(users, dimension, seed=seed), torch.sign(normal(users, seed=seed + 1))


def ac_sa(steps, gradient, start, project=lambda theta: theta):
    """AC-SA as Lan (2012) writes it, slowly; the gradient's second argument is the step."""
    theta = aggregate = start
    for t, size in enumerate(steps, 1):
        alpha = 2 / (t + 2)
        middle = alpha * theta + (1 - alpha) * aggregate
        theta = project(theta - gradient(middle, t) / size)
        aggregate = alpha * theta + (1 - alpha) * aggregate
    return aggregate


def by_autograd(loss, theta, data):
    """The reference: each record in a batch of its own."""
    rows, values = [], []
    for i in range(number_of_users(data)):
        point = theta.detach().clone().requires_grad_()
        value = loss(point, take(data, [i])).sum()
        rows.append(torch.autograd.grad(value, point)[0])
        values.append(value.detach())
    return torch.stack(values), torch.stack(rows)
