"""The part of a calibration that runs inside the engine, as plain JSON and back."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from specbench.estimators.acceptance_prior import AcceptancePrior, validate_prior
from specbench.estimators.calibration_store import Calibration
from specbench.estimators.ngram_table import NgramTable, Stratification, validate_table

SOURCE = "the calibration"


@dataclass(frozen=True)
class EngineCalibration:
    """What an engine needs to price chains.

    Attributes:
        ngram: survival of n-gram chains; also says which suffix lengths to look up.
        temperatures: of the model drafter's confidences by position; None leaves them raw.
        acceptance: what is expected of the model drafter before it drafts, if known.
    """

    ngram: NgramTable
    temperatures: tuple[float, ...] | None
    acceptance: AcceptancePrior | None = None


def to_payload(calibration: Calibration) -> dict[str, Any]:
    """As sent to the workers.

    Raises:
        ValueError: the calibration has no n-gram table.
    """
    table = calibration.ngram
    if table is None:
        raise ValueError("a calibration without an n-gram table is of no use to a policy")
    scaling, acceptance = calibration.temperatures, calibration.acceptance
    return {
        "min_n": table.min_n,
        "max_n": table.max_n,
        "features": list(table.stratification.features),
        "recent_edges": list(table.stratification.recent_edges),
        "survival": table.survival.tolist(),
        "temperatures": None if scaling is None else list(scaling.temperatures),
        "acceptance": None if acceptance is None else asdict(acceptance),
    }


def from_payload(payload: dict[str, Any]) -> EngineCalibration:
    """Read :func:`to_payload` back; raises InputError where the table is not valid."""
    strata = Stratification(tuple(payload["features"]), tuple(payload["recent_edges"]))
    survival = np.asarray(payload["survival"], dtype=np.float32)
    table = NgramTable(survival, payload["min_n"], payload["max_n"], strata)
    validate_table(table, SOURCE)
    temperatures, found = payload["temperatures"], payload["acceptance"]
    acceptance = None
    if found is not None:
        acceptance = AcceptancePrior(**{**found, "conditional": tuple(found["conditional"])})
        validate_prior(acceptance, SOURCE)
    return EngineCalibration(
        table, None if temperatures is None else tuple(temperatures), acceptance
    )
