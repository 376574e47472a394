"""Estimators behave as scikit-learn asks, cut rows by public numbers, say what a fit reveals."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.utils.estimator_checks import parametrize_with_checks

from opacus_shuffle import Guarantee, PrivacyAssumptionWarning
from opacus_shuffle.estimators import ShuffleClassifier, ShuffleRegressor
from opacus_shuffle.estimators.linear_models import multinomial_loss

pytestmark = pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning")
ROWS = np.random.default_rng(0).normal(size=(40, 3))


@parametrize_with_checks(
    [ShuffleClassifier(solver="accelerated_sgd"), ShuffleRegressor(solver="accelerated_sgd")]
)
def test_scikit_learns_own_checks_pass(estimator, check):
    check(estimator)


@pytest.mark.zoo
def test_many_digits_are_learnt_within_the_budget():
    images, labels = load_digits(return_X_y=True)
    images = images / 60
    model = ShuffleClassifier(epsilon=8.0, weight_norm=20.0, classes=range(10)).fit(images, labels)
    chance, error = 0.1, (0.1 * 0.9 / len(labels)) ** 0.5
    assert model.score(images, labels) > chance + 20 * error  # 0.87 at epsilon = 4
    assert model.privacy_.epsilon <= 8.0
    assert model.privacy_.guarantee is Guarantee.PROVED
    assert model.coef_.shape == (10, 64)


@pytest.mark.parametrize("labels", [ROWS[:, 0] > 0, np.digitize(ROWS[:, 0], [-0.5, 0.5])])
def test_probabilities_are_of_the_labels_predicted(labels):
    model = ShuffleClassifier().fit(ROWS, labels)
    probabilities = model.predict_proba(ROWS)
    assert np.allclose(probabilities.sum(1), 1)
    assert (model.classes_[probabilities.argmax(1)] == model.predict(ROWS)).all()


@pytest.mark.parametrize("intercept", [True, pytest.param(False, marks=pytest.mark.zoo)])
def test_a_line_is_learnt_as_well_as_is_proved(intercept):
    """Its absolute loss is 0, so the bound is on the model's own, here below that of no model."""
    rows = np.random.default_rng(1).normal(size=(3000, 2)) / 4
    targets = rows @ [1.0, -2.0] + 0.5 * intercept
    model = ShuffleRegressor(epsilon=15.0, row_norm=1.5, weight_norm=3.0, fit_intercept=intercept)
    errors = np.abs(model.fit(rows, targets).predict(rows) - targets)
    assert errors.mean() < model.excess_loss_bound_ < np.abs(targets).mean()
    assert (model.intercept_ != 0) == intercept


@pytest.mark.parametrize("classes", [3, 7])
def test_no_multinomial_gradient_is_longer_than_the_root_of_two_nor_steeper_than_a_half(classes):
    generator = torch.Generator().manual_seed(classes)
    loss = multinomial_loss(classes)
    for _ in range(50):
        row = torch.nn.functional.normalize(torch.randn(1, 4, generator=generator).double(), dim=1)
        batch = row, torch.randint(classes, (1,), generator=generator)
        theta = 10 * torch.randn(4 * classes, generator=generator).double()
        gradient = torch.func.jacrev(loss)(theta, batch)
        hessian = torch.func.hessian(loss)(theta, batch)[0]
        assert gradient.norm() <= 2**0.5 * (1 + 1e-12)
        assert torch.linalg.eigvalsh(hessian).max() <= 0.5 * (1 + 1e-12)


def test_a_row_has_the_same_reach_however_long_it_is():
    rows = ROWS / np.linalg.norm(ROWS, axis=1, keepdims=True)
    labels, longer = rows[:, 0] > 0, rows.copy()
    longer[0] *= 1e6
    fits = [ShuffleClassifier(random_state=0).fit(given, labels).coef_ for given in (rows, longer)]
    assert np.allclose(*fits)


def test_a_seeded_fit_is_repeated_and_says_that_it_is_not_private():
    with pytest.warns(PrivacyAssumptionWarning, match="random_state=3"):
        first = ShuffleRegressor(random_state=3).fit(ROWS, ROWS[:, 0])
    second = clone(first).fit(ROWS, ROWS[:, 0])
    assert (first.coef_ == second.coef_).all()
    assert first.privacy_.guarantee is not Guarantee.PROVED
    assert "random_state" in first.privacy_.covers


def test_labels_that_are_not_given_are_pointed_out():
    rows, labels = np.eye(4), np.array([0, 1, 0, 1])
    with pytest.warns(PrivacyAssumptionWarning, match="classes="):
        ShuffleClassifier().fit(rows, labels)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyAssumptionWarning)
        assert ShuffleClassifier(classes=[0, 1, 2]).fit(rows, labels).coef_.shape == (3, 4)
    with pytest.raises(ValueError, match="classes must contain every label"):
        ShuffleClassifier(classes=[0, 2]).fit(rows, labels)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epsilon", 0),
        ("epsilon", 16),
        ("delta", 1),
        ("row_norm", -1),
        ("weight_norm", 0),
        ("solver", "adam"),
        ("fit_intercept", 2),
    ],
)
@pytest.mark.parametrize("model", [ShuffleClassifier, ShuffleRegressor])
def test_bad_parameters_are_refused_by_name_before_data_are_read(model, name, value):
    with pytest.raises(ValueError, match=name):
        model(**{name: value}).fit("no data", None)
