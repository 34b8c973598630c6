"""Fields of JSON artefacts, read with errors that name the file and the field."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from specbench.errors import InputError

# The largest table of the default lookup (36 strata, 33 lengths, 16 positions) takes 0.2 MB.
MAX_FILE_BYTES = 64 * 2**20


def read_json_object(path: Path) -> dict[str, Any]:
    """Parse a file that must hold one JSON object of bounded size.

    Raises:
        InputError: missing, unreadable, too large, truncated or not an object.
    """
    try:
        num_bytes = path.stat().st_size
        if num_bytes > MAX_FILE_BYTES:
            raise InputError(
                f"{path}: {num_bytes / 2**20:.0f} MB; a calibration is never over "
                f"{MAX_FILE_BYTES // 2**20} MB"
            )
        payload = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as problem:
        raise InputError(f"{path}: not a text file; expected JSON") from problem
    except json.JSONDecodeError as problem:
        raise InputError(
            f"{path}, line {problem.lineno}: not valid JSON ({problem.msg}); "
            f"truncated? copy or write it again"
        ) from problem
    except (OSError, ValueError, RecursionError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise InputError(f"cannot read {path}: {reason}") from problem
    if not isinstance(payload, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(payload).__name__}")
    return payload


def number(value: Any, where: str) -> float:
    """A finite JSON number; raises InputError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{where}: expected a number, got {value!r:.40}")
    try:
        result = float(value)
    except OverflowError as problem:
        raise InputError(f"{where}: number too large") from problem
    if not math.isfinite(result):
        raise InputError(f"{where}: {result} is not a finite number")
    return result


def whole(value: Any, where: str) -> int:
    """A whole JSON number; raises InputError for anything else."""
    result = number(value, where)
    if not result.is_integer():
        raise InputError(f"{where}: expected a whole number, got {value!r}")
    return int(result)


def text(value: Any, where: str) -> str:
    """A JSON string that is not empty; raises InputError for anything else."""
    if not isinstance(value, str) or not value:
        raise InputError(f"{where}: expected text, got {value!r:.40}")
    return value


def numbers(value: Any, where: str) -> tuple[float, ...]:
    """A JSON list of finite numbers; raises InputError naming the index."""
    if not isinstance(value, list):
        raise InputError(f"{where} must be a list of numbers")
    return tuple(number(item, f"{where}[{i}]") for i, item in enumerate(value))


def mapping(value: Any, where: str) -> dict[str, Any]:
    """A JSON object; raises InputError for anything else."""
    if not isinstance(value, dict):
        raise InputError(f"{where}: expected an object, got {type(value).__name__}")
    return value
