"""Policies by name. Importing this package registers the built-in ones."""

from specbench.policies import ar, dspark, ngram
from specbench.policies.base import (
    POLICIES,
    Drafter,
    Policy,
    StepCosts,
    VerifyBatch,
    make_policy,
)

__all__ = [
    "POLICIES",
    "Drafter",
    "Policy",
    "StepCosts",
    "VerifyBatch",
    "ar",
    "dspark",
    "make_policy",
    "ngram",
]
