"""Give a running engine the calibration that fits it."""

from __future__ import annotations

from pathlib import Path

from specbench.calibration.shipped import FoundCalibration, find_calibration
from specbench.calibration.tokenizer import tokenizer_fingerprint
from specbench.engines.vllm import VLLMEngine
from specbench.errors import UsageError
from specbench.estimators.engine_payload import to_payload


async def install_calibration(
    engine: VLLMEngine, given: Path | None, *, wanted_by: str
) -> FoundCalibration:
    """Find the calibration for this engine's models and install it in every worker.

    Args:
        engine: running, with a model drafter.
        given: folder the user named; None looks in the cache and among the shipped ones.
        wanted_by: policy that needs it, for the message if there is none.

    Raises:
        UsageError: none fits; the one given is for other models, or has no n-gram table.
        InputError: a calibration is damaged.
    """
    target, drafter = engine.target, engine.drafter
    found = find_calibration(
        given,
        model_fingerprint=target.fingerprint,
        tokenizer_fingerprint=tokenizer_fingerprint(target.path_or_id),
        drafter_fingerprint=None if drafter is None else drafter.fingerprint,
        is_default_model=target.is_default,
    )
    if found is None or found.calibration.ngram is None:
        reason = "none fits this model" if found is None else f"{found.folder} has no n-gram table"
        raise UsageError(
            f"policy {wanted_by!r} needs a calibration of acceptance and {reason}; "
            "run 'specbench calibrate'"
        )
    source = found.origin if found.origin == "shipped" else str(found.folder)
    await engine.set_calibration(to_payload(found.calibration), source)
    return found
