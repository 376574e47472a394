"""``ShuffleClassifier`` and ``ShuffleRegressor``: linear models for users who trust a shuffler.

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


# A dataclass, because scikit-learn reads the parameters from the signature of the constructor.
@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class ShuffleLinearModel(BaseEstimator):  # type: ignore[misc]
    """The base class of both models: parameters, clipping of rows to a public length, and the run.

    Args:
        epsilon: ε of the fit, in (0, 15], if one user's row and target are replaced by any other.
        delta: δ of the fit, in (0, ½).
        row_norm: Rows with a larger norm are scaled down to it. Choose it without looking at the
            data.
        weight_norm: The largest norm of the weights (and of the intercept, in units of
            ``row_norm``).
        fit_intercept: Whether to fit an intercept.
        solver: ``"gradient_descent"``: every user sends bits in every round; the most accurate one
            with few users. ``"accelerated_sgd"`` or ``"sgd"``: every user sends once.
        random_state: None draws rounding, order and noise from the operating system. A number makes
            the fit repeatable. It is then not private: anyone who knows the number can remove the
            noise.
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

    def _row_bound(self) -> float:
        """Checks all parameters and returns a bound on the norm of a row with its constant."""
        one_of("solver", self.solver, tuple(SOLVERS))
        PrivacyBudget(self.epsilon, self.delta)
        positive("weight_norm", self.weight_norm)
        row_norm = positive("row_norm", self.row_norm)
        return row_norm * 2**0.5 if boolean("fit_intercept", self.fit_intercept) else row_norm

    def _clipped_rows(self, X: Any) -> Tensor:
        """Returns rows of norm at most ``row_norm``, with a constant for the intercept, float64."""
        rows = torch.tensor(np.asarray(X, dtype=np.float64))
        norms = rows.norm(dim=1, keepdim=True)
        rows = torch.where(norms > self.row_norm, rows * (self.row_norm / norms), rows)
        if self.fit_intercept:
            constant = torch.full((len(rows), 1), float(self.row_norm), dtype=torch.float64)
            rows = torch.cat([rows, constant], dim=1)
        return rows

    def _minimize(
        self,
        loss: Any,
        data: tuple[Tensor, Tensor],
        dimension: int,
        lipschitz: float,
        smoothness: float | None,
    ) -> Tensor:
        """Minimises the loss and stores the attributes of the fit; returns the weights."""
        generator = None
        if self.random_state is not None:
            seed = int(check_random_state(self.random_state).randint(2**31 - 1))
            generator = torch.Generator().manual_seed(seed)
        problem = Problem(
            loss,
            data,
            constraint=L2Ball(self.weight_norm),
            # Rounding may leave a scaled row slightly too long.
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
                f"This fit is not private: anyone who knows random_state={self.random_state!r} can "
                "draw its noise again. Use random_state=None for sensitive data",
                PrivacyAssumptionWarning,
                stacklevel=3,
            )
        self.excess_loss_bound_ = estimate.excess_loss_bound
        self.n_iter_ = len(estimate.history)
        return estimate.theta

    def _store_weights(self, weights: Rows) -> None:
        """Sets ``coef_`` and ``intercept_`` from weights (..., entries of a row)."""
        self.coef_, self.intercept_ = weights, np.zeros(weights.shape[:-1])
        if self.fit_intercept:
            self.coef_, self.intercept_ = weights[..., :-1], weights[..., -1] * self.row_norm

    def _scores(self, X: Any) -> Rows:
        """Returns one score per row and output."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64)
        rows = self._clipped_rows(X)[:, : self.n_features_in_].numpy()
        return np.asarray(rows @ self.coef_.T + self.intercept_)


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class ShuffleClassifier(ClassifierMixin, ShuffleLinearModel):  # type: ignore[misc]
    """Logistic regression for users who send random bits to a shuffler and trust no one else.

    The loss is logistic for two classes and multinomial for more, in a single run.

    Args:
        epsilon: ε of the fit, in (0, 15], if one user's row and target are replaced by any other.
        delta: δ of the fit, in (0, ½).
        row_norm: Rows with a larger norm are scaled down to it. Choose it without looking at the
            data.
        weight_norm: The largest norm of the weights (and of the intercept, in units of
            ``row_norm``).
        fit_intercept: Whether to fit an intercept.
        solver: ``"gradient_descent"``: every user sends bits in every round; the most accurate one
            with few users. ``"accelerated_sgd"`` or ``"sgd"``: every user sends once.
        random_state: None draws rounding, order and noise from the operating system. A number makes
            the fit repeatable. It is then not private: anyone who knows the number can remove the
            noise.
        classes: All possible labels, known beforehand. None takes those in ``y``, which reveals
            that they occur. If only one user has a label, this reveals that user's label, and ε
            does not account for it.

    Attributes:
        coef_: Weights, (1, features) for two classes, else (classes, features).
        intercept_: (1,) or (classes,).
        classes_: The labels.
        privacy_: The ε of the fit with its meaning
            (:class:`~opacus_shuffle.protocols.statement.PrivacyStatement`).
        excess_loss_bound_: A proved bound on the expected excess loss (see
            :class:`~opacus_shuffle.sco.solver.Estimate`).
        n_iter_: The number of rounds.

    Raises:
        ValueError: From ``fit``, if a parameter is out of range, or a label is not among
            ``classes``.

    Warns:
        PrivacyAssumptionWarning: From ``fit``, if ``classes`` are taken from ``y``, or
            ``random_state`` is given.

    Formal Guarantees:
        (ε, δ)-DP of the fitted model under replacement of one row with its label, for every data
        set, against an adversary who sees all shuffled messages. The number of rows is public. An
        error that ``fit`` raises because of the content of ``X`` or ``y`` is not covered.
    """

    classes: Any = None

    def fit(self, X: Any, y: Any) -> ShuffleClassifier:
        """Fits the model to rows (users, features) and labels (users,)."""
        row_bound = self._row_bound()
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(y)
        if self.classes is None:
            warnings.warn(
                "classes are taken from y, which reveals the labels that occur: pass all possible "
                "labels as classes=",
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
                f"classes must contain every label of y, got {list(self.classes_)!r}: add the "
                "missing ones"
            )
        labels, rows = torch.from_numpy(np.searchsorted(self.classes_, y)), self._clipped_rows(X)
        width, count = rows.shape[1], len(self.classes_)
        if count == 2:
            signs = 2.0 * labels - 1
            theta = self._minimize(logistic_loss, (rows, signs), width, row_bound, row_bound**2 / 4)
            self._store_weights(theta.numpy()[None])
            return self
        # The gradient is (p − e_y)xᵀ, |p − e_y|² ≤ 2; p's covariance has no eigenvalue above ½
        # (Gershgorin).
        lipschitz, smoothness = 2**0.5 * row_bound, row_bound**2 / 2
        loss = multinomial_loss(count)
        theta = self._minimize(loss, (rows, labels), count * width, lipschitz, smoothness)
        self._store_weights(theta.numpy().reshape(count, width))
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        # scikit-learn's checks have too few rows to learn anything despite the noise.
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
    """Linear regression by least absolute deviations, for users who trust only a shuffler.

    A target may be any number: the influence of a user on the weights is bounded by the norm of the
    row. Scale the targets by a public constant so that weights within ``weight_norm`` can fit them.

    Args:
        epsilon: ε of the fit, in (0, 15], if one user's row and target are replaced by any other.
        delta: δ of the fit, in (0, ½).
        row_norm: Rows with a larger norm are scaled down to it. Choose it without looking at the
            data.
        weight_norm: The largest norm of the weights (and of the intercept, in units of
            ``row_norm``).
        fit_intercept: Whether to fit an intercept.
        solver: ``"gradient_descent"``: every user sends bits in every round; the most accurate one
            with few users. ``"accelerated_sgd"`` or ``"sgd"``: every user sends once.
        random_state: None draws rounding, order and noise from the operating system. A number makes
            the fit repeatable. It is then not private: anyone who knows the number can remove the
            noise.

    Attributes:
        coef_: Weights, (features,).
        intercept_: The intercept, a number.
        privacy_: The ε of the fit with its meaning
            (:class:`~opacus_shuffle.protocols.statement.PrivacyStatement`).
        excess_loss_bound_: A proved bound on the expected excess absolute loss.
        n_iter_: The number of rounds.

    Raises:
        ValueError: From ``fit``, if a parameter is out of range.

    Warns:
        PrivacyAssumptionWarning: From ``fit``, if ``random_state`` is given.

    Formal Guarantees:
        The same as for :class:`ShuffleClassifier`, for rows with their targets.
    """

    def fit(self, X: Any, y: Any) -> ShuffleRegressor:
        """Fits the model to rows (users, features) and targets (users,)."""
        row_bound = self._row_bound()
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, ensure_min_samples=2)
        rows = self._clipped_rows(X)
        targets = torch.tensor(np.asarray(y, dtype=np.float64))
        theta = self._minimize(absolute_loss, (rows, targets), rows.shape[1], row_bound, None)
        self._store_weights(theta.numpy())
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True  # as for the classifier
        return tags

    def predict(self, X: Any) -> Rows:
        """Returns predictions, (rows,)."""
        return self._scores(X)


def multinomial_loss(classes: int) -> Callable[[Tensor, Any], Tensor]:
    """Returns the multinomial logistic loss, a function of θ (classes · entries of a row,).

    A batch consists of rows and of labels that start at 0.
    """

    def loss(theta: Tensor, batch: Any) -> Tensor:
        rows, labels = batch
        scores = rows @ theta.reshape(classes, -1).T
        return torch.nn.functional.cross_entropy(scores, labels, reduction="none")

    return loss
