"""``Estimate``: what a shuffle-private optimiser has found, what it reveals, and how it came about."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opacus_shuffle.core.rounding import round_up
from opacus_shuffle.protocols.statement import PrivacyStatement

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclasses.dataclass(frozen=True)
class Round:
    """One round, as far as the analyzer may publish it: everything here is computed from shuffled messages.

    Attributes:
        number: From 0.
        users: How many users have taken part so far, this round included.
        gradient_norm: Norm of the noisy mean gradient.
        theta: The parameters after the round, shape (d,); None for rounds that keep none.
    """

    number: int
    users: int
    gradient_norm: float
    theta: Tensor | None = None


class History:
    """Collects rounds; keeps the parameters of at most ``snapshots`` of them, evenly spread and always the last."""

    def __init__(self, rounds: int, snapshots: int = 200) -> None:
        self._planned, self._every = rounds, math.ceil(rounds / snapshots)
        self.rounds: list[Round] = []

    def add(self, *, users: int, gradient: Tensor, theta: Tensor) -> None:
        """Records the next round."""
        number = len(self.rounds)
        keep = (self._planned - 1 - number) % self._every == 0
        self.rounds.append(Round(number, users, float(gradient.norm()), theta.clone() if keep else None))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """The outcome of a shuffle-private optimiser.

    Attributes:
        theta: The estimate, float64, shape (d,).
        privacy: What the run reveals, to whom.
        history: One entry per round.
        choices: What was used: batch size, step size, smoothness, …
        excess_loss_bound: At least E[f(theta)] − min over the set of f, where f is the mean loss of a fresh user, the
            expectation is over users and randomness, and the minimum is over the constraint set. Proved if the users are
            independent with one distribution, and every user's loss is convex, ``lipschitz``-Lipschitz on the set,
            ``smoothness``-smooth where that was given, and ``diameter``, where given, is at least the distance from the start
            to a minimiser. It never depends on the data, so nothing is revealed by it; it does not notice when the
            assumptions fail (a ``clip=True`` that cuts, say). None where nothing is proved: steps that are too long, a last
            iterate. It counts on all users following the protocol.
    """

    theta: Tensor
    privacy: PrivacyStatement
    history: list[Round]
    choices: Mapping[str, Any]
    excess_loss_bound: float | None = None

    def __str__(self) -> str:
        used = ", ".join(f"{name}={_short(value)}" for name, value in self.choices.items())
        if self.excess_loss_bound is None:
            quality = "excess loss: nothing is proved for these settings"
        else:
            quality = (
                f"expected excess loss at most {round_up(self.excess_loss_bound)} (users independent with one distribution; "
                "loss convex and as Lipschitz and smooth as stated)"
            )
        return (
            f"estimate of {self.theta.numel()} parameters after {len(self.history)} rounds\n{used}\n{quality}\n{self.privacy}"
        )

    def plot(self, ax: Axes | None = None, *, value: Callable[[Tensor], float] | None = None) -> Axes:
        """Draws the run, over the number of users that have taken part.

        Args:
            ax: Where to draw; a new figure by default.
            value: What to draw of the parameters, for example their loss on public data (a loss on the users' own data
                is not private). By default the norm of the noisy gradient.

        Returns:
            The axes.

        Raises:
            ImportError: If matplotlib is missing.
        """
        if ax is None:
            try:
                import matplotlib.pyplot as plt
            except ImportError as error:
                raise ImportError("plot needs matplotlib: pip install 'opacus_shuffle[plots]'") from error
            ax = plt.subplots(figsize=(6.4, 4.0), layout="constrained")[1]
        rounds = self.history if value is None else [each for each in self.history if each.theta is not None]
        # In a fully interactive run the same users take part again and again.
        full = self.privacy.rounds_per_user > 1
        heights = [each.gradient_norm if value is None or each.theta is None else float(value(each.theta)) for each in rounds]
        ax.plot([each.number + 1 if full else each.users for each in rounds], heights, color="#0072B2", linewidth=1.4)
        ax.set_xlabel("rounds" if full else "users so far")
        ax.set_ylabel("norm of the noisy gradient" if value is None else "value")
        ax.set_title(f"({self.privacy.epsilon:.3g}, {self.privacy.delta:.3g})-DP, {self.privacy.interaction}", fontsize=11)
        ax.grid(alpha=0.3)
        return ax


def _short(value: Any) -> str:
    """Returns a value in a few characters."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, torch.Tensor | list | tuple) and len(value) > 4:
        return f"[{_short(value[0])}, …, {_short(value[-1])}]"
    return str(value)
