"""``ShuffleClassifier`` and ``ShuffleRegressor``: linear models whose users trust only a shuffler.

The optimisers are those of Cheu, Joseph, Mao and Peng's shuffle-private convex optimisation (SCO).
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.special import expit, softmax
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from opacus_shuffle.core.guarantees import Guarantee, PrivacyAssumptionWarning
from opacus_shuffle.core.validation import boolean, one_of, positive
from opacus_shuffle.sco import (
    Estimate,
    L2Ball,
    PrivacyBudget,
    Problem,
    absolute_loss,
    logistic_loss,
    shuffle_accelerated_sgd,
    shuffle_gradient_descent,
    shuffle_sgd,
)

Rows = np.ndarray[Any, np.dtype[Any]]
SOLVERS: dict[str, Callable[[Problem, PrivacyBudget], Estimate]] = {
    "accelerated_sgd": shuffle_accelerated_sgd,
    "gradient_descent": shuffle_gradient_descent,
    "sgd": shuffle_sgd,
}


# A dataclass because scikit-learn reads parameters off a constructor's signature.
@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class ShuffleLinearModel(BaseEstimator):  # type: ignore[misc]
    """What both models share: parameters, rows that are cut to a public length, and the run.

    Args:
        epsilon: ε of the fit, in (0, 15], if one user's row and target are replaced by any other.
        delta: δ of the fit, in (0, ½).
        row_norm: Longer rows are cut to this length, each by itself. Choose it without looking at
            the data.
        weight_norm: The weights (and the intercept, in units of ``row_norm``) stay within this
            distance of 0.
        fit_intercept: Whether there is one.
        solver: ``"gradient_descent"``: every user sends bits in every round, which learns most from
            few users. ``"accelerated_sgd"`` or ``"sgd"``: every user sends once.
        random_state: None draws rounding, order and noise from the operating system. A number
            repeats the fit, and then it is not private: whoever knows the number can take the noise
            off.
    """

    epsilon: float = 1.0
    delta: float = 1e-6
    row_norm: float = 1.0
    weight_norm: float = 8.0
    fit_intercept: bool = True
    solver: str = "gradient_descent"
    random_state: Any = None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = self.random_state is None
        return tags

    def _longest(self) -> float:
        """Returns the length that no row exceeds with its constant; checks all parameters."""
        one_of("solver", self.solver, tuple(SOLVERS))
        PrivacyBudget(self.epsilon, self.delta)
        positive("weight_norm", self.weight_norm)
        row_norm = positive("row_norm", self.row_norm)
        return row_norm * 2**0.5 if boolean("fit_intercept", self.fit_intercept) else row_norm

    def _rows(self, X: Any) -> Tensor:
        """Returns rows cut to ``row_norm``, with a constant for the intercept, float64."""
        rows = torch.tensor(np.asarray(X, dtype=np.float64))
        lengths = rows.norm(dim=1, keepdim=True)
        rows = torch.where(lengths > self.row_norm, rows * (self.row_norm / lengths), rows)
        if self.fit_intercept:
            constant = torch.full((len(rows), 1), float(self.row_norm), dtype=torch.float64)
            rows = torch.cat([rows, constant], dim=1)
        return rows

    def _run(
        self,
        loss: Any,
        data: tuple[Tensor, Tensor],
        dimension: int,
        lipschitz: float,
        smoothness: float | None,
    ) -> Tensor:
        """Minimises the loss, and keeps what came out and what it reveals."""
        generator = None
        if self.random_state is not None:
            seed = int(check_random_state(self.random_state).randint(2**31 - 1))
            generator = torch.Generator().manual_seed(seed)
        problem = Problem(
            loss,
            data,
            constraint=L2Ball(self.weight_norm),
            # A row that was cut to its length may be longer by rounding.
            lipschitz=lipschitz * (1 + 1e-9),
            smoothness=smoothness,
            dimension=dimension,
            clip=True,
            generator=generator,
        )
        estimate = SOLVERS[self.solver](problem, PrivacyBudget(self.epsilon, self.delta))
        self.privacy_ = estimate.privacy
        if generator is not None:
            self.privacy_ = dataclasses.replace(
                estimate.privacy,
                guarantee=Guarantee.ESTIMATE,
                covers="no data set: its noise was drawn from random_state",
            )
            warnings.warn(
                f"This fit is not private: whoever knows random_state={self.random_state!r} can "
                "draw its noise again. Use random_state=None for data that matter",
                PrivacyAssumptionWarning,
                stacklevel=3,
            )
        self.excess_loss_bound_ = estimate.excess_loss_bound
        self.n_iter_ = len(estimate.history)
        return estimate.theta

    def _keep(self, weights: Rows) -> None:
        """Stores weights (..., entries of a row) as ``coef_`` and ``intercept_``."""
        self.coef_, self.intercept_ = weights, np.zeros(weights.shape[:-1])
        if self.fit_intercept:
            self.coef_, self.intercept_ = weights[..., :-1], weights[..., -1] * self.row_norm

    def _scores(self, X: Any) -> Rows:
        """Returns one score per row and output."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64)
        rows = self._rows(X)[:, : self.n_features_in_].numpy()
        return np.asarray(rows @ self.coef_.T + self.intercept_)


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class ShuffleClassifier(ClassifierMixin, ShuffleLinearModel):  # type: ignore[misc]
    """Logistic regression on users who send random bits to a shuffler, and trust nobody else.

    Two classes have the logistic loss, more have the multinomial one, in one run.

    Args:
        epsilon: ε of the fit, in (0, 15], if one user's row and target are replaced by any other.
        delta: δ of the fit, in (0, ½).
        row_norm: Longer rows are cut to this length, each by itself. Choose it without looking at
            the data.
        weight_norm: The weights (and the intercept, in units of ``row_norm``) stay within this
            distance of 0.
        fit_intercept: Whether there is one.
        solver: ``"gradient_descent"``: every user sends bits in every round, which learns most from
            few users. ``"accelerated_sgd"`` or ``"sgd"``: every user sends once.
        random_state: None draws rounding, order and noise from the operating system. A number
            repeats the fit, and then it is not private: whoever knows the number can take the noise
            off.
        classes: All labels that there may be, known beforehand. None takes those in ``y``, which
            shows that they occur: a label that only one user has gives that user away, and no ε
            counts it.

    Attributes:
        coef_: Weights, (1, features) for two classes, else (classes, features).
        intercept_: (1,) or (classes,).
        classes_: The labels.
        privacy_: The ε of the fit with its meaning
            (:class:`~opacus_shuffle.protocols.statement.PrivacyStatement`).
        excess_loss_bound_: A proved number for the expected excess loss (see
            :class:`~opacus_shuffle.sco.solver.Estimate`).
        n_iter_: Rounds.

    Raises:
        ValueError: From ``fit``, if a parameter is out of range, or a label is not among
            ``classes``.

    Warns:
        PrivacyAssumptionWarning: From ``fit``, if ``classes`` are taken from ``y``, or
            ``random_state`` is given.

    Formal Guarantees:
        (ε, δ)-DP of the fitted model under replacement of one row with its label, for every data
        set, against whoever sees all shuffled messages. The number of rows is public. That a fit
        raises an error because of what is in ``X`` or ``y`` is not covered.
    """

    classes: Any = None

    def fit(self, X: Any, y: Any) -> ShuffleClassifier:
        """Fits the model to rows (users, features) and labels (users,)."""
        longest = self._longest()
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(y)
        if self.classes is None:
            warnings.warn(
                "classes are taken from y, which shows which labels occur: pass all labels that "
                "there may be as classes=",
                PrivacyAssumptionWarning,
                stacklevel=2,
            )
        self.classes_ = np.unique(y if self.classes is None else np.asarray(self.classes))
        if len(self.classes_) < 2:
            raise ValueError(
                f"classes must be at least two, got one class ({self.classes_[0]!r}): pass classes="
            )
        if not np.isin(y, self.classes_).all():
            raise ValueError(
                f"classes must hold every label of y, got {list(self.classes_)!r}: add those that "
                "are missing"
            )
        labels, rows = torch.from_numpy(np.searchsorted(self.classes_, y)), self._rows(X)
        width, count = rows.shape[1], len(self.classes_)
        if count == 2:
            signs = 2.0 * labels - 1
            theta = self._run(logistic_loss, (rows, signs), width, longest, longest**2 / 4)
            self._keep(theta.numpy()[None])
            return self
        # The gradient is (p − e_y)xᵀ, |p − e_y|² ≤ 2; p's covariance has no eigenvalue above ½
        # (Gershgorin).
        lipschitz, smoothness = 2**0.5 * longest, longest**2 / 2
        loss = multinomial_loss(count)
        theta = self._run(loss, (rows, labels), count * width, lipschitz, smoothness)
        self._keep(theta.numpy().reshape(count, width))
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        # On so few rows as scikit-learn's checks have, noise is all there is.
        tags.classifier_tags.poor_score = True
        return tags

    def decision_function(self, X: Any) -> Rows:
        """Returns scores: (rows,) for two classes, else (rows, classes)."""
        scores = self._scores(X)
        return scores[:, 0] if len(self.classes_) == 2 else scores

    def predict_proba(self, X: Any) -> Rows:
        """Returns probabilities, (rows, classes)."""
        scores = self.decision_function(X)
        if len(self.classes_) > 2:
            return np.asarray(softmax(scores, axis=1))
        return np.stack([expit(-scores), expit(scores)], axis=1)

    def predict(self, X: Any) -> Rows:
        """Returns the most probable labels, (rows,)."""
        scores = self.decision_function(X)
        return np.asarray(
            self.classes_[scores.argmax(axis=1) if scores.ndim == 2 else (scores > 0).astype(int)]
        )


class ShuffleRegressor(RegressorMixin, ShuffleLinearModel):  # type: ignore[misc]
    """Linear regression by least absolute deviations, on users who trust only a shuffler.

    A target may be any number: one user's pull on the weights is bounded by the length of the row.
    Scale targets by a public constant so that weights within ``weight_norm`` can reach them.

    Args:
        epsilon: ε of the fit, in (0, 15], if one user's row and target are replaced by any other.
        delta: δ of the fit, in (0, ½).
        row_norm: Longer rows are cut to this length, each by itself. Choose it without looking at
            the data.
        weight_norm: The weights (and the intercept, in units of ``row_norm``) stay within this
            distance of 0.
        fit_intercept: Whether there is one.
        solver: ``"gradient_descent"``: every user sends bits in every round, which learns most from
            few users. ``"accelerated_sgd"`` or ``"sgd"``: every user sends once.
        random_state: None draws rounding, order and noise from the operating system. A number
            repeats the fit, and then it is not private: whoever knows the number can take the noise
            off.

    Attributes:
        coef_: Weights, (features,).
        intercept_: A number.
        privacy_: The ε of the fit with its meaning
            (:class:`~opacus_shuffle.protocols.statement.PrivacyStatement`).
        excess_loss_bound_: A proved number for the expected excess absolute loss.
        n_iter_: Rounds.

    Raises:
        ValueError: From ``fit``, if a parameter is out of range.

    Warns:
        PrivacyAssumptionWarning: From ``fit``, if ``random_state`` is given.

    Formal Guarantees:
        As :class:`ShuffleClassifier`'s, of rows with their targets.
    """

    def fit(self, X: Any, y: Any) -> ShuffleRegressor:
        """Fits the model to rows (users, features) and targets (users,)."""
        longest = self._longest()
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, ensure_min_samples=2)
        rows = self._rows(X)
        targets = torch.tensor(np.asarray(y, dtype=np.float64))
        theta = self._run(absolute_loss, (rows, targets), rows.shape[1], longest, None)
        self._keep(theta.numpy())
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True  # as the classifier's
        return tags

    def predict(self, X: Any) -> Rows:
        """Returns predictions, (rows,)."""
        return self._scores(X)


def multinomial_loss(classes: int) -> Callable[[Tensor, Any], Tensor]:
    """Returns the multinomial logistic loss of θ, of shape (classes · entries of a row,).

    Its batches are rows and labels from 0.
    """

    def loss(theta: Tensor, batch: Any) -> Tensor:
        rows, labels = batch
        scores = rows @ theta.reshape(classes, -1).T
        return torch.nn.functional.cross_entropy(scores, labels, reduction="none")

    return loss
