"""Cost tables as JSON files, and the cache that finds them by fingerprint.

History of the file format (``VERSION``), documented in docs/cost-tables.md:

1  first version.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from specbench.cache import cache_dir, write_text_atomically
from specbench.costs.table import ContextCosts, CostCurve, CostTable, Padding, validate
from specbench.errors import InputError

FORMAT = "specbench-cost-table"
VERSION = 1
# A table of ten contexts with a thousand sizes each takes under 1 MB.
MAX_FILE_BYTES = 8 * 2**20
IMPORTED_KEY = "imported_from"

_SHAPE = (
    '{"contexts": [{"context_tokens": 512, "draft": {"tokens": [...], "ms": [...]}, '
    '"verify": {...}}]}'
)


def to_json(table: CostTable) -> str:
    """The file's text; costs survive the round trip to the last bit."""
    payload = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": table.fingerprint,
        "padding": table.padding if table.padding == "none" else list(table.padding),
        "contexts": [
            {
                "context_tokens": context.context_tokens,
                "draft": _curve_json(context.draft),
                "verify": _curve_json(context.verify),
            }
            for context in table.contexts
        ],
        # JSON has no NaN; a foreign file's remarks may hold one.
        "provenance": json.loads(json.dumps(table.provenance), parse_constant=lambda _: None),
    }
    return json.dumps(payload, indent=2, allow_nan=False) + "\n"


def from_payload(payload: dict[str, Any], source: str) -> CostTable:
    """Build and validate a table from parsed JSON.

    Raises:
        InputError: foreign format, unknown version, wrong shape or invalid costs.
    """
    if payload.get("format") != FORMAT:
        raise InputError(
            f"{source}: not a specbench cost table; 'specbench costs import' reads foreign ones"
        )
    if payload.get("version") != VERSION:
        raise InputError(
            f"{source}: cost table version {payload.get('version')!r}, this specbench reads "
            f"version {VERSION}; profile again or use the specbench that wrote it"
        )
    contexts = payload.get("contexts")
    if not isinstance(contexts, list) or not all(isinstance(item, dict) for item in contexts):
        raise InputError(f"{source}: expected {_SHAPE}")
    provenance = payload.get("provenance", {})
    table = CostTable(
        contexts=tuple(_context(item, f"{source}, context {i}") for i, item in enumerate(contexts)),
        fingerprint=_fingerprint(payload.get("fingerprint"), source),
        provenance=provenance if isinstance(provenance, dict) else {},
        padding=_padding(payload.get("padding", "none"), source),
    )
    validate(table, source)
    return table


def read_table(path: Path) -> CostTable:
    """Read and validate a table; raises InputError that names the file."""
    return from_payload(read_json_object(path), str(path))


def write_table(table: CostTable, path: Path) -> None:
    """Validate and write atomically; raises EnvironmentProblem if the path cannot be written."""
    validate(table, str(path))
    write_text_atomically(path, to_json(table))


def read_json_object(path: Path) -> dict[str, Any]:
    """Parse a file that must hold one JSON object of bounded size.

    Raises:
        InputError: missing, unreadable, too large, truncated or not an object.
    """
    try:
        num_bytes = path.stat().st_size
        if num_bytes > MAX_FILE_BYTES:
            raise InputError(
                f"{path}: {num_bytes / 2**20:.1f} MB; a cost table is never over "
                f"{MAX_FILE_BYTES // 2**20} MB"
            )
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise InputError(f"{path}: not a text file; expected JSON") from problem
    except (OSError, ValueError) as problem:  # ValueError: a NUL byte in the name
        reason = getattr(problem, "strerror", None) or problem
        raise InputError(f"cannot read {path}: {reason}") from problem
    try:
        payload = json.loads(text)
    except json.JSONDecodeError as problem:
        raise InputError(
            f"{path}, line {problem.lineno}: not valid JSON ({problem.msg}); "
            f"truncated? copy or write it again"
        ) from problem
    except (ValueError, RecursionError) as problem:
        raise InputError(f"{path}: JSON beyond any cost table: {problem}") from problem
    if not isinstance(payload, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(payload).__name__}")
    return payload


def curve_from_payload(payload: Any, where: str) -> CostCurve:
    """A curve from ``{"tokens": [...], "ms": [...]}``; types are checked, values are not."""
    if not isinstance(payload, dict):
        raise InputError(f'{where}: expected {{"tokens": [...], "ms": [...]}}')
    return CostCurve(int_list(payload, "tokens", where), float_list(payload, "ms", where))


def int_list(payload: dict[str, Any], key: str, where: str) -> tuple[int, ...]:
    """The list of whole numbers under ``key``; raises InputError naming key and index."""
    return tuple(_whole(item, f"{where}, {key}[{i}]") for i, item in _list(payload, key, where))


def float_list(payload: dict[str, Any], key: str, where: str) -> tuple[float, ...]:
    """The list of numbers under ``key``; raises InputError naming key and index."""
    return tuple(number(item, f"{where}, {key}[{i}]") for i, item in _list(payload, key, where))


def number(value: Any, where: str) -> float:
    """A JSON number as float; raises InputError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{where}: expected a number, got {value!r:.40}")
    try:
        return float(value)
    except OverflowError as problem:
        raise InputError(f"{where}: number too large") from problem


def table_path(fingerprint: dict[str, str]) -> Path:
    """Where the cache keeps the table of this fingerprint."""
    canonical = json.dumps(fingerprint, sort_keys=True).encode()
    return tables_dir() / f"{hashlib.sha256(canonical).hexdigest()[:16]}.json"


def tables_dir() -> Path:
    """The cache's folder of tables; may not exist yet."""
    return cache_dir() / "cost-tables"


def find_table(fingerprint: dict[str, str]) -> CostTable | None:
    """The cached table of this fingerprint, None if there is none.

    Raises:
        InputError: the cached file is damaged or holds another engine's table.
    """
    path = table_path(fingerprint)
    if not path.exists():
        return None
    table = read_table(path)
    check_fingerprint(table, fingerprint, str(path))
    return table


def save_table(table: CostTable) -> Path:
    """Put a table into the cache under its fingerprint; returns its path.

    Raises:
        InputError: the table is not valid.
        EnvironmentProblem: the cache cannot be written or the disk is full.
    """
    path = table_path(table.fingerprint)
    write_table(table, path)
    return path


def cached_tables() -> list[Path]:
    """Files in the cache, by name."""
    return sorted(tables_dir().glob("*.json"))


def check_fingerprint(table: CostTable, expected: dict[str, str], source: str) -> None:
    """Refuse a table that was measured on another engine configuration.

    An imported table knows little about its engine: only keys that both sides have are
    compared.

    Raises:
        InputError: names every key that differs, with both values.
    """
    found = table.fingerprint
    if IMPORTED_KEY in found:
        shared = found.keys() & expected.keys()
        found = {key: found[key] for key in shared}
        expected = {key: expected[key] for key in shared}
    if found != expected:
        raise InputError(
            f"{source}: measured on another engine ({explain_mismatch(expected, found)}); "
            f"run 'specbench costs profile' on this one"
        )


def explain_mismatch(expected: dict[str, str], found: dict[str, str]) -> str:
    """Every differing key with both values, for one line; empty if nothing differs."""
    keys = sorted(expected.keys() | found.keys())
    return "; ".join(
        f"{key}: this engine {_value(expected, key)}, table {_value(found, key)}"
        for key in keys
        if expected.get(key) != found.get(key)
    )


def _value(fingerprint: dict[str, str], key: str) -> str:
    return repr(fingerprint[key]) if key in fingerprint else "not stated"


def _curve_json(curve: CostCurve) -> dict[str, list[Any]]:
    return {"tokens": list(curve.tokens), "ms": list(curve.ms)}


def _context(item: dict[str, Any], where: str) -> ContextCosts:
    return ContextCosts(
        context_tokens=_whole(item.get("context_tokens"), f"{where}, context_tokens"),
        draft=curve_from_payload(item.get("draft"), f"{where}, draft"),
        verify=curve_from_payload(item.get("verify"), f"{where}, verify"),
    )


def _fingerprint(value: Any, source: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise InputError(f"{source}: the fingerprint must map names to text")
    return value


def _padding(value: Any, source: str) -> Padding:
    if value == "none":
        return "none"
    return int_list({"padding": value}, "padding", source)


def _list(payload: dict[str, Any], key: str, where: str) -> list[tuple[int, Any]]:
    value = payload.get(key)
    if not isinstance(value, list):
        raise InputError(f"{where}: {key} must be a list of numbers")
    return list(enumerate(value))


def _whole(value: Any, where: str) -> int:
    as_float = number(value, where)
    if not as_float.is_integer():
        raise InputError(f"{where}: expected a whole number, got {value!r}")
    return int(value)
