"""Policies by name. Importing this package registers the built-in ones."""

from specbench.policies import ar, dspark, forespark, hybrid, ngram
from specbench.policies.base import (
    POLICIES,
    DraftBatch,
    DraftBudget,
    Drafter,
    Policy,
    PreDraftBatch,
    StepCosts,
    VerifyBatch,
    make_policy,
)
from specbench.policies.chain_choice import ChainChoice

__all__ = [
    "POLICIES",
    "ChainChoice",
    "DraftBatch",
    "DraftBudget",
    "Drafter",
    "Policy",
    "PreDraftBatch",
    "StepCosts",
    "VerifyBatch",
    "ar",
    "dspark",
    "forespark",
    "hybrid",
    "make_policy",
    "ngram",
]
