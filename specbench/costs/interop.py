"""Cost tables of TensorRT-LLM and SGLang, read and written where the meaning matches.

Both engines price a step as ``bias + alpha(requests) + theta(tokens)``: theta is what the
target's pass adds per token, alpha what each further request adds (its draft pass among
it), bias the rest. docs/cost-tables.md lists what maps to what, and what is uncertain.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from specbench.costs.fit import isotonic
from specbench.costs.store import (
    FORMAT,
    IMPORTED_KEY,
    curve_from_payload,
    float_list,
    from_payload,
    int_list,
    number,
    read_json_object,
)
from specbench.costs.table import ContextCosts, CostCurve, CostTable, breakpoints, validate
from specbench.errors import InputError, UsageError

# SGLang's profiler calls a point implausible when its rate rises by more than this above
# its predecessor's; larger dips are refused here, smaller ones smoothed.
MAX_SMOOTHING = 0.10
_MS_PER_SECOND = 1000.0
_TINY_MS = 1e-9  # keeps a curve of zeros from dividing by zero


class TableFormat(StrEnum):
    """Cost-table files that are told apart by their keys."""

    SPECBENCH = "specbench"
    TENSORRT_LLM = "tensorrt-llm"
    SGLANG = "sglang"
    SGLANG_SIMPLE = "sglang-simple"


_KEYS = {
    TableFormat.TENSORRT_LLM: ("token_counts", "step_time_ms"),
    TableFormat.SGLANG: ("bias_seconds", "m_probes", "theta_seconds"),
    TableFormat.SGLANG_SIMPLE: ("sample_batch_tokens", "sample_steps_per_sec"),
}


@dataclass(frozen=True)
class _ForeignTable:
    """What a foreign file says, in milliseconds.

    Attributes:
        tokens, verify_ms: bias + theta by tokens of the target's pass.
        requests, request_ms: alpha by requests; empty if the format has none.
    """

    tokens: tuple[int, ...]
    verify_ms: tuple[float, ...]
    requests: tuple[int, ...] = ()
    request_ms: tuple[float, ...] = ()


def detect_format(payload: dict[str, Any], source: str) -> TableFormat:
    """Tell by the keys; raises InputError if none or several formats fit."""
    if payload.get("format") == FORMAT:
        return TableFormat.SPECBENCH
    fitting = [name for name, keys in _KEYS.items() if all(key in payload for key in keys)]
    if len(fitting) == 1:
        return fitting[0]
    expected = "; ".join(f"{name.value}: {', '.join(keys)}" for name, keys in _KEYS.items())
    found = ", ".join(sorted(payload)[:8]) or "none"
    problem = "keys of several formats" if fitting else "not a cost table known here"
    raise InputError(f"{source}: {problem} (keys: {found:.200}; expected {expected})")


def import_table(
    path: Path,
    *,
    context_tokens: int = 0,
    draft_from: Path | None = None,
    draft_length: int | None = None,
) -> CostTable:
    """Read a foreign cost table, or one of ours.

    No foreign format has a draft curve. One of two statements by the user supplies it:

    Args:
        path: file to read.
        context_tokens: context length it was measured at, if known.
        draft_from: take the draft curve of this specbench table or curve file. States
            that the steps of the foreign table do not include drafting.
        draft_length: every request drafted this many tokens. The batch overhead then
            becomes the draft curve, at ``requests * draft_length`` drafted tokens.

    Raises:
        InputError: unreadable, invalid, or something in it has no place here.
        UsageError: the options do not fit the file or each other.
    """
    payload = read_json_object(path)
    found = detect_format(payload, str(path))
    if found is TableFormat.SPECBENCH:
        if draft_from is not None or draft_length is not None:
            raise UsageError(f"{path} is a specbench table and has its own draft curve")
        return from_payload(payload, str(path))
    foreign = _READERS[found](payload, str(path))
    verify = _curve(foreign.tokens, foreign.verify_ms, f"{path}, step times")
    draft = _draft_curve(foreign, path, context_tokens, draft_from, draft_length)
    table = CostTable(
        contexts=(ContextCosts(context_tokens, draft, verify),),
        fingerprint={IMPORTED_KEY: found.value, "content": _digest(payload, draft, context_tokens)},
        provenance={
            "source": path.name,
            "draft_from": None if draft_from is None else draft_from.name,
            "draft_length": draft_length,
            "original": payload,
        },
    )
    validate(table, str(path))
    return table


def export_table(
    table: CostTable,
    target: TableFormat,
    *,
    context_tokens: int | None = None,
    draft_length: int | None = None,
) -> dict[str, Any]:
    """The JSON object another engine reads.

    Args:
        table: what to export; staircases become pairs of equal points.
        target: the format.
        context_tokens: which context length; may be left out if there is only one.
        draft_length: tokens every request drafts; required where the format has a batch
            overhead, which then carries the draft curve.

    Raises:
        UsageError: an option is missing or does not fit the table.
    """
    context = _pick_context(table, context_tokens)
    verify = breakpoints(context.verify, table.padding)
    origin = {"fingerprint": table.fingerprint, "context_tokens": context.context_tokens}
    if target is TableFormat.SGLANG_SIMPLE:
        return {
            "sample_batch_tokens": list(verify.tokens),
            "sample_steps_per_sec": [_MS_PER_SECOND / ms for ms in verify.ms],
            "max_batch_tokens": verify.tokens[-1],
        }
    requests, request_ms = _request_costs(context.draft, draft_length, target)
    if target is TableFormat.TENSORRT_LLM:
        return {
            "token_counts": list(verify.tokens),
            "step_time_ms": list(verify.ms),
            "fixed_overhead_ms": 0.0,
            "batch_sizes": requests,
            "batch_overhead_ms": request_ms,
            "_meta": {"specbench": origin},
        }
    if target is TableFormat.SGLANG:
        # SGLang stores both terms relative to their first probe; the bias holds the rest.
        return {
            "bias_seconds": (verify.ms[0] + request_ms[0]) / _MS_PER_SECOND,
            "bs_probes": requests,
            "alpha_seconds": [(ms - request_ms[0]) / _MS_PER_SECOND for ms in request_ms],
            "m_probes": list(verify.tokens),
            "theta_seconds": [(ms - verify.ms[0]) / _MS_PER_SECOND for ms in verify.ms],
        }
    raise UsageError(f"{target.value!r} is no foreign format; copy the table's file instead")


def _read_tensorrt_llm(payload: dict[str, Any], source: str) -> _ForeignTable:
    if payload.get("SYNTHETIC"):
        raise InputError(f"{source}: marked SYNTHETIC, it was made up and measures nothing")
    fixed_ms = number(payload.get("fixed_overhead_ms", 0.0), f"{source}, fixed_overhead_ms")
    step_ms = float_list(payload, "step_time_ms", source)
    has_batch_axis = "batch_sizes" in payload or "batch_overhead_ms" in payload
    return _ForeignTable(
        tokens=int_list(payload, "token_counts", source),
        verify_ms=tuple(fixed_ms + ms for ms in step_ms),
        requests=int_list(payload, "batch_sizes", source) if has_batch_axis else (),
        request_ms=float_list(payload, "batch_overhead_ms", source) if has_batch_axis else (),
    )


def _read_sglang(payload: dict[str, Any], source: str) -> _ForeignTable:
    bias_s = number(payload["bias_seconds"], f"{source}, bias_seconds")
    theta_s = float_list(payload, "theta_seconds", source)
    alpha_s = float_list(payload, "alpha_seconds", source)
    return _ForeignTable(
        tokens=int_list(payload, "m_probes", source),
        verify_ms=tuple((bias_s + seconds) * _MS_PER_SECOND for seconds in theta_s),
        requests=int_list(payload, "bs_probes", source),
        request_ms=tuple(seconds * _MS_PER_SECOND for seconds in alpha_s),
    )


def _read_sglang_simple(payload: dict[str, Any], source: str) -> _ForeignTable:
    rates = float_list(payload, "sample_steps_per_sec", source)
    for index, rate in enumerate(rates):
        if not rate > 0:
            raise InputError(
                f"{source}, sample_steps_per_sec[{index}]: {rate} is not above 0; measure it again"
            )
    return _ForeignTable(
        tokens=int_list(payload, "sample_batch_tokens", source),
        verify_ms=tuple(_MS_PER_SECOND / rate for rate in rates),
    )


_READERS = {
    TableFormat.TENSORRT_LLM: _read_tensorrt_llm,
    TableFormat.SGLANG: _read_sglang,
    TableFormat.SGLANG_SIMPLE: _read_sglang_simple,
}


def _digest(payload: dict[str, Any], draft: CostCurve, context_tokens: int) -> str:
    """Keeps different imports apart in the cache."""
    content = json.dumps([payload, draft.tokens, draft.ms, context_tokens], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _draft_curve(
    foreign: _ForeignTable,
    path: Path,
    context_tokens: int,
    draft_from: Path | None,
    draft_length: int | None,
) -> CostCurve:
    if (draft_from is None) == (draft_length is None):
        raise UsageError(
            f"{path} has no draft curve: give exactly one of --draft-from (a table or curve file) "
            f"and --draft-length (tokens each request drafts, to use its batch overhead)"
        )
    has_request_costs = any(ms != 0 for ms in foreign.request_ms)
    if draft_from is not None:
        if has_request_costs:
            raise InputError(
                f"{path}: its batch overhead already holds the draft pass and cannot be kept "
                f"beside a draft curve; use --draft-length, or set the overheads to 0"
            )
        return _read_draft_curve(draft_from, context_tokens)
    if not has_request_costs:
        raise InputError(f"{path}: no batch overhead to draw a draft curve from; use --draft-from")
    if draft_length is None or draft_length < 1:
        raise UsageError("--draft-length must be at least 1")
    drafted = tuple(size * draft_length for size in foreign.requests)
    return _curve(drafted, foreign.request_ms, f"{path}, batch overhead")


def _read_draft_curve(path: Path, context_tokens: int) -> CostCurve:
    payload = read_json_object(path)
    if payload.get("format") != FORMAT:
        return curve_from_payload(payload, str(path))
    table = from_payload(payload, str(path))
    only = len(table.contexts) == 1
    return _pick_context(table, None if only else context_tokens).draft


def _pick_context(table: CostTable, context_tokens: int | None) -> ContextCosts:
    if context_tokens is None and len(table.contexts) == 1:
        return table.contexts[0]
    for context in table.contexts:
        if context.context_tokens == context_tokens:
            return context
    known = ", ".join(str(context.context_tokens) for context in table.contexts)
    raise UsageError(f"choose one of the table's context lengths with --context: {known}")


def _request_costs(
    draft: CostCurve, draft_length: int | None, target: TableFormat
) -> tuple[list[int], list[float]]:
    """Draft costs by requests, each drafting ``draft_length`` tokens."""
    if draft_length is None or draft_length < 1:
        raise UsageError(
            f"{target.value} has no draft curve, only a batch overhead: give --draft-length "
            f"(tokens each request drafts, at least 1)"
        )
    points = [
        (tokens // draft_length, ms)
        for tokens, ms in zip(draft.tokens, draft.ms, strict=True)
        if tokens > 0 and tokens % draft_length == 0
    ]
    if len(points) < 2:
        raise UsageError(
            f"the draft curve has fewer than 2 sizes that are multiples of "
            f"--draft-length {draft_length} (its sizes: {', '.join(map(str, draft.tokens[:12]))})"
        )
    return [requests for requests, _ in points], [ms for _, ms in points]


def _curve(tokens: tuple[int, ...], ms: Sequence[float], where: str) -> CostCurve:
    """A monotone curve; small dips are smoothed, large ones refused."""
    raw = CostCurve(tokens, tuple(ms))
    increasing = all(low < high for low, high in pairwise(tokens))
    finite = all(np.isfinite(raw.ms))
    if len(tokens) != len(raw.ms) or len(tokens) < 2 or not increasing or not finite:
        return raw  # for validate() to refuse with its own words
    fitted = isotonic(raw.ms, [1.0] * len(raw.ms))
    change = np.abs(fitted - np.asarray(raw.ms))
    # The first overheads are 0 by convention, so a point's own height alone is no scale.
    excess = change / np.maximum(np.maximum(raw.ms, float(np.median(raw.ms))), _TINY_MS)
    worst = int(excess.argmax())
    if excess[worst] > MAX_SMOOTHING:
        raise InputError(
            f"{where}, index {worst}: {raw.ms[worst]:g} ms at {tokens[worst]} is more than "
            f"{MAX_SMOOTHING:.0%} off a non-decreasing curve; measure that size again"
        )
    return CostCurve(tokens, tuple(float(value) for value in fitted))
