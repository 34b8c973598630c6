"""Temperatures of confidence heads in the JSON of SGLang and TensorRT-LLM.

| key | SGLang | TensorRT-LLM | meaning |
|---|---|---|---|
| ``temperatures`` | yes | yes, a copy | one a position, above 0: c_j = sigmoid(logit_j / T_j) |
| ``sts_temperatures`` | no | yes | the same |
| ``ece_before``, ``ece_after`` | yes | yes | calibration error of the survival, may be empty |
| ``dataset``, ``num_samples`` | yes | yes | where the fit comes from |
| ``max_draft_len`` | no | sometimes | number of positions, checked if present |

Both fit against the cumulative product with the same sigmoid, so the numbers carry over.
Read from both projects' public sources in late 2026, not from a published specification.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from specbench.cache import write_text_atomically
from specbench.errors import InputError
from specbench.estimators.json_fields import number, numbers, read_json_object, whole

_SGLANG_KEY = "temperatures"
_TENSORRT_KEY = "sts_temperatures"


class StsFormat(StrEnum):
    """Whose keys a file is written with; reading takes either."""

    SGLANG = "sglang"
    TENSORRT_LLM = "tensorrt-llm"


@dataclass(frozen=True)
class StsTable:
    """Temperatures by position, and how well they did where they were fitted.

    Attributes:
        temperatures: [num_positions], above 0.
        ece_before, ece_after: [num_positions] calibration error of the survival without
            and with them; empty if unknown.
        dataset: name of the text they were fitted on.
        num_samples: blocks they were fitted on; 0 if unknown.
    """

    temperatures: tuple[float, ...]
    ece_before: tuple[float, ...] = ()
    ece_after: tuple[float, ...] = ()
    dataset: str = ""
    num_samples: int = 0


def read_temperatures(path: Path) -> StsTable:
    """Read and validate either engine's file; raises InputError that names the file."""
    return temperatures_from_payload(read_json_object(path), str(path))


def write_temperatures(path: Path, table: StsTable, target: StsFormat) -> None:
    """Validate and write atomically.

    Raises:
        InputError: the table is not valid.
        EnvironmentProblem: the path cannot be written.
    """
    validate_temperatures(table, str(path))
    payload = temperatures_to_payload(table, target)
    write_text_atomically(path, json.dumps(payload, indent=2, allow_nan=False) + "\n")


def temperatures_to_payload(table: StsTable, target: StsFormat) -> dict[str, Any]:
    """The JSON object that ``target`` reads."""
    payload: dict[str, Any] = {}
    if target is StsFormat.TENSORRT_LLM:
        payload[_TENSORRT_KEY] = list(table.temperatures)
    payload[_SGLANG_KEY] = list(table.temperatures)
    payload["ece_before"] = list(table.ece_before)
    payload["ece_after"] = list(table.ece_after)
    payload["dataset"] = table.dataset
    payload["num_samples"] = table.num_samples
    return payload


def temperatures_from_payload(payload: dict[str, Any], source: str) -> StsTable:
    """Build and validate a table from parsed JSON of either engine.

    Raises:
        InputError: no temperatures, both keys with different ones, or invalid values.
    """
    found = [key for key in (_TENSORRT_KEY, _SGLANG_KEY) if key in payload]
    if not found:
        keys = ", ".join(sorted(payload)[:8]) or "none"
        raise InputError(
            f"{source}: not a temperature file (keys: {keys:.200}; expected {_SGLANG_KEY!r} or "
            f"{_TENSORRT_KEY!r})"
        )
    values = {key: numbers(payload[key], f"{source}, {key}") for key in found}
    if len(set(values.values())) > 1:
        raise InputError(
            f"{source}: {_TENSORRT_KEY!r} and {_SGLANG_KEY!r} differ; keep the right one"
        )
    dataset = payload.get("dataset", "")
    table = StsTable(
        temperatures=values[found[0]],
        ece_before=numbers(payload.get("ece_before", []), f"{source}, ece_before"),
        ece_after=numbers(payload.get("ece_after", []), f"{source}, ece_after"),
        dataset=dataset if isinstance(dataset, str) else "",
        num_samples=whole(payload.get("num_samples", 0), f"{source}, num_samples"),
    )
    validate_temperatures(table, source)
    declared = payload.get("max_draft_len")
    if declared is not None and number(declared, f"{source}, max_draft_len") != len(
        table.temperatures
    ):
        raise InputError(
            f"{source}: max_draft_len {declared}, but {len(table.temperatures)} temperatures"
        )
    return table


def validate_temperatures(table: StsTable, source: str) -> None:
    """Raise InputError, naming ``source`` and the entry, for values no fit can give."""
    if not table.temperatures:
        raise InputError(f"{source}: the list of temperatures is empty")
    for index, temperature in enumerate(table.temperatures):
        if not 0 < temperature < float("inf"):
            raise InputError(
                f"{source}, temperatures[{index}]: {temperature} is not above 0 and finite; "
                f"calibrate again"
            )
    for name, values in (("ece_before", table.ece_before), ("ece_after", table.ece_after)):
        if values and len(values) != len(table.temperatures):
            raise InputError(
                f"{source}: {len(table.temperatures)} temperatures but {len(values)} in {name}"
            )
        for index, value in enumerate(values):
            if not 0 <= value <= 1:
                raise InputError(f"{source}, {name}[{index}]: {value} is not within 0 to 1")
    if table.num_samples < 0:
        raise InputError(f"{source}: num_samples {table.num_samples} is negative")
