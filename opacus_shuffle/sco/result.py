"""``Estimate``: what a shuffle-private optimiser has found, what it reveals, and how it came about."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opacus_shuffle.core import extras
from opacus_shuffle.core.rounding import round_up
from opacus_shuffle.protocols.statement import PrivacyStatement

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SNAPSHOTS = 200


@dataclasses.dataclass(frozen=True)
class Round:
    """One round, as far as the analyzer may publish it: everything here is computed from shuffled messages.

    ``number`` counts from 0, ``users`` are all that have taken part so far, ``gradient_norm`` is that of the noisy mean, and
    ``theta`` (d,) are the parameters after the round; None for rounds that keep none.
    """

    number: int
    users: int
    gradient_norm: float
    theta: Tensor | None = None


class History:
    """Collects rounds, phase by phase; keeps the parameters of at most 200 of a phase's, evenly spread and always the last."""

    def __init__(self) -> None:
        self.rounds: list[Round] = []
        self._users = 0  # who have taken part so far

    def begin(self, *, rounds: int, users: int) -> None:
        """Prepares for a phase of so many rounds and users."""
        self._every, self._first, self._last = math.ceil(rounds / _SNAPSHOTS), len(self.rounds), len(self.rounds) + rounds - 1
        self._most_users = self._users + users

    @property
    def planned(self) -> int:
        """How many rounds there will have been when this phase ends."""
        return self._last + 1

    @property
    def share(self) -> float:
        """The share of this phase's rounds that are over."""
        return (len(self.rounds) - self._first) / (self.planned - self._first)

    def add(self, *, users: int, gradient: Tensor, theta: Tensor) -> None:
        """Records the next round, of so many users."""
        number, self._users = len(self.rounds), min(self._users + users, self._most_users)
        kept = theta.clone() if (self._last - number) % self._every == 0 else None
        self.rounds.append(Round(number, self._users, float(gradient.norm()), kept))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """The outcome of a shuffle-private optimiser.

    Attributes:
        theta: The estimate, float64, shape (d,).
        privacy: What the run reveals, to whom.
        history: One entry per round.
        choices: What was used: batch size, step size, smoothness, …
        excess_loss_bound: At least E[f(theta)] − min over the set of f, where f is the mean loss of a fresh user, the
            expectation is over users and randomness, and the minimum is over the constraint set. Proved if all users follow the
            protocol and are independent with one distribution, every user's loss is convex, and Lipschitz and smooth as stated,
            and ``diameter``, where given, is at least the distance from the start to a minimiser. It never depends on the data:
            it reveals nothing, nor notices when this fails (a ``clip=True`` that cuts, say). None where nothing is proved:
            steps that are too long, a last iterate.
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
                raise ImportError(extras.missing("plot", "matplotlib", "plots")) from error
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
    if isinstance(value, Mapping):
        return f"({', '.join(f'{name}={_short(each)}' for name, each in value.items())})"
    if isinstance(value, torch.Tensor | list | tuple):
        shown = [_short(each) for each in (value if len(value) <= 4 else [value[0], value[-1]])]
        return f"[{', '.join(shown)}]" if len(value) <= 4 else f"[{shown[0]}, …, {shown[1]}]"
    return str(value)
