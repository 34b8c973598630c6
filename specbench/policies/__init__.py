"""Policies by name. Importing this package registers the built-in ones."""

from specbench.policies import ar, dspark, hybrid, ngram
from specbench.policies.base import (
    POLICIES,
    DraftBatch,
    Drafter,
    Policy,
    StepCosts,
    VerifyBatch,
    make_policy,
)
from specbench.policies.chain_choice import ChainChoice

__all__ = [
    "POLICIES",
    "ChainChoice",
    "DraftBatch",
    "Drafter",
    "Policy",
    "StepCosts",
    "VerifyBatch",
    "ar",
    "dspark",
    "hybrid",
    "make_policy",
    "ngram",
]
