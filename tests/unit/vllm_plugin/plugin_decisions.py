"""A decision object of a small engine, with made-up costs and calibration installed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from specbench.costs import ContextCosts, CostCurve, CostTable
from specbench.estimators.acceptance_prior import AcceptancePrior
from specbench.estimators.engine_payload import EngineCalibration
from specbench.estimators.ngram_table import NgramTable, Stratification
from specbench.vllm_plugin.decisions import EngineLimits, StepDecisions

MAX_REQS, SLOTS, BLOCK = 4, 16, 7
LIMITS = EngineLimits(SLOTS, BLOCK, MAX_REQS, 512, 1000, torch.device("cpu"))


def cost_table() -> CostTable:
    """A step costs 10 ms and 1 ms for 511 tokens more, drafting 1 ms for 64 tokens."""
    verify = CostCurve(tokens=(1, 512), ms=(10.0, 11.0))
    draft = CostCurve(tokens=(0, 64), ms=(0.0, 1.0))
    context = ContextCosts(context_tokens=128, draft=draft, verify=verify)
    return CostTable(contexts=(context,), fingerprint={}, provenance={}, padding="none")


PRIOR = AcceptancePrior((0.8,) * BLOCK, weight=2.0, decay=0.9, resolution=0.0)


def calibration(
    temperatures: tuple[float, ...] | None = None, acceptance: AcceptancePrior | None = PRIOR
) -> EngineCalibration:
    """Every copied token is worth one half, whatever matched."""
    survival = np.full((1, 9, SLOTS), 0.5, dtype=np.float32)
    table = NgramTable(survival, 2, 8, Stratification())
    return EngineCalibration(table, temperatures, acceptance)


def make_decisions(*, installed: bool = True, **limits: Any) -> StepDecisions:
    decisions = StepDecisions(replace(LIMITS, **limits))
    if installed:
        decisions.set_costs(cost_table())
        decisions.set_calibration(calibration())
    return decisions
