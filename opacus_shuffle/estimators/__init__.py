"""Linear models with the interface of scikit-learn, trained without a trusted server.

They run the optimisers of :mod:`opacus_shuffle.sco` behind ``fit`` and ``predict``;
``docs/estimators.rst`` has examples. They need scikit-learn (the extra ``scikit-learn``).
"""

from opacus_shuffle.core import imports

try:
    import sklearn  # noqa: F401
except ImportError as error:
    raise ImportError(
        imports.missing_extra("opacus_shuffle.estimators", "scikit-learn", "scikit-learn")
    ) from error

from opacus_shuffle.estimators.linear_models import ShuffleClassifier, ShuffleRegressor

__all__ = ["ShuffleClassifier", "ShuffleRegressor"]
