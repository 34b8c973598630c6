"""Everything that was measured, one row a request and one row a step, as Parquet files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import polars as pl

from specbench.errors import InputError, SpecbenchError
from specbench.records import RequestRecord, RoundRecord, StepRecord

REQUESTS_FILE = "requests.parquet"
STEPS_FILE = "steps.parquet"

REQUEST_SCHEMA: dict[str, Any] = {
    "request_id": pl.String,
    "item_id": pl.String,
    "turn": pl.Int32,
    "policy": pl.String,
    "round_index": pl.Int32,
    "warmup": pl.Boolean,
    "num_prompt_tokens": pl.Int32,
    "intended_s": pl.Float64,
    "sent_s": pl.Float64,
    "finished_s": pl.Float64,
    "chunk_times_s": pl.List(pl.Float64),
    "chunk_tokens": pl.List(pl.Int32),
    "output_token_ids": pl.List(pl.Int32),
    "finish_reason": pl.String,
    "error": pl.String,
}

STEP_SCHEMA: dict[str, Any] = {
    "policy": pl.String,
    "round_index": pl.Int32,
    "warmup": pl.Boolean,
    "step_index": pl.Int32,
    "num_requests": pl.Int32,
    "num_decoding": pl.Int32,
    "num_prompt_tokens": pl.Int32,
    "num_verified_tokens": pl.Int32,
    "num_accepted_tokens": pl.Int32,
    "num_emitted_tokens": pl.Int32,
    "num_drafted_tokens": pl.Int32,
    "num_requests_verified": pl.Int32,
    "step_ms": pl.Float64,
    "verify_ms": pl.Float64,
    "draft_ms": pl.Float64,
    "decide_ms": pl.Float64,
    "context_tokens": pl.Float64,
    "accepted_per_request": pl.List(pl.Int32),
    "verified_per_request": pl.List(pl.Int32),
    "drafted_per_request": pl.List(pl.Int32),
    "predicted_survival": pl.List(pl.List(pl.Float32)),
    "shown_survival": pl.List(pl.List(pl.Float32)),
}


def requests_frame(rounds: Sequence[RoundRecord]) -> pl.DataFrame:
    """One row a request, warm-ups included; columns as in :class:`RequestRecord`."""
    rows = [_row(request) for record in rounds for request in record.requests]
    return pl.DataFrame(rows, schema=REQUEST_SCHEMA)


def steps_frame(rounds: Sequence[RoundRecord]) -> pl.DataFrame:
    """One row an engine step, with the round it belongs to and its index in that round."""
    rows = [
        {
            "policy": record.policy,
            "round_index": record.round_index,
            "warmup": record.warmup,
            "step_index": index,
            **_row(step),
        }
        for record in rounds
        for index, step in enumerate(record.steps)
    ]
    return pl.DataFrame(rows, schema=STEP_SCHEMA)


def write_records(directory: Path, rounds: Sequence[RoundRecord]) -> None:
    """Write ``requests.parquet`` and ``steps.parquet`` into an existing directory.

    Raises:
        SpecbenchError: a file could not be written.
    """
    try:
        for name, frame in (
            (REQUESTS_FILE, requests_frame(rounds)),
            (STEPS_FILE, steps_frame(rounds)),
        ):
            temporary = directory / f".{name}.partial"
            frame.write_parquet(temporary)
            temporary.replace(directory / name)
    except OSError as error:
        raise SpecbenchError(f"cannot write the records to {directory}: {error}") from None


def read_steps(directory: Path) -> pl.DataFrame:
    """The steps that a run with ``--records`` left, warm-ups included.

    Raises:
        InputError: there are none, or not as this version writes them.
    """
    path = directory / STEPS_FILE
    if not path.is_file():
        raise InputError(f"no {STEPS_FILE} in {directory}; name the folder given as --records")
    try:
        frame = pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise InputError(f"{path} cannot be read as Parquet: {error}") from None
    missing = sorted(set(STEP_SCHEMA) - set(frame.columns))
    if missing:
        raise InputError(f"{path} lacks {', '.join(missing)}; measure again with this version")
    return frame


def _row(record: RequestRecord | StepRecord) -> dict[str, Any]:
    values = {item.name: getattr(record, item.name) for item in fields(record)}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}
