"""Audits: lower bounds on ε from attacks on a mechanism or a training run.

>>> round(epsilon_lower_bound(0, 500, 1000, delta=1e-5).epsilon, 3)
4.846
"""

from __future__ import annotations

from opacus_shuffle.audit.canary import CanaryTrial, GradientCanary
from opacus_shuffle.audit.lower_bounds import LowerBound, audit_scores, epsilon_lower_bound
from opacus_shuffle.audit.mechanism_audits import (
    audit_gaussian,
    audit_secret_checkin,
    audit_shuffle_gauss,
)
from opacus_shuffle.audit.result import AuditResult, Finding
from opacus_shuffle.audit.training_audit import audit_training

__all__ = [
    "AuditResult",
    "CanaryTrial",
    "Finding",
    "GradientCanary",
    "LowerBound",
    "audit_gaussian",
    "audit_scores",
    "audit_secret_checkin",
    "audit_shuffle_gauss",
    "audit_training",
    "epsilon_lower_bound",
]
