"""The result document: its shape, and the check that a loaded file has it.

Format history (``RESULT_VERSION``):

1  first version.
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from specbench.errors import InputError

RESULT_FORMAT = "specbench-result"
RESULT_VERSION = 1


class DistributionMs(TypedDict):
    """A latency sample, in milliseconds."""

    mean: float
    median: float
    p90: float
    p99: float


class Ratio(TypedDict):
    """Throughput relative to the baseline; ``ci95`` is [low, high] or null."""

    value: float | None
    ci95: list[float] | None


class RoundResult(TypedDict):
    """One policy's share of one round, as measured."""

    round: int
    complete: bool
    duration_s: float
    num_requests: int
    num_failed: int
    output_tokens: int
    output_throughput: float | None
    ratio_to_baseline: float | None
    acceptance_length: float | None
    mean_step_ms: float | None


class Latencies(TypedDict):
    """Latency samples of the requests that ended well; null if there are none."""

    ttft_ms: DistributionMs | None
    tpot_ms: DistributionMs | None
    e2el_ms: DistributionMs | None
    itl_ms: DistributionMs | None
    itl_per_chunk_ms: DistributionMs | None
    queue_ms: DistributionMs | None


class Acceptance(TypedDict):
    """What was drafted, verified and kept; null where nothing was verified."""

    acceptance_length: float | None
    acceptance_length_per_step: float | None
    acceptance_by_position: list[float]
    conditional_acceptance_by_position: list[float | None]
    acceptance_rate_of_verified: float | None
    acceptance_rate_of_drafted: float | None
    drafted_tokens: int
    verified_tokens: int
    accepted_tokens: int
    # Not in files written before 2026-12-07.
    unverified_tokens: NotRequired[int]
    undrafted_share: NotRequired[float | None]
    mean_verified: float | None


class StepTime(TypedDict):
    """Engine steps and where their time went; shares add up to 1."""

    num_steps: int
    mean_step_ms: float | None
    draft_share: float | None
    verify_share: float | None
    decide_share: float | None
    other_share: float | None


class PolicyResult(Latencies, Acceptance, StepTime):
    """One policy over all its complete rounds; null where a value is undefined."""

    policy: str
    num_rounds: int
    num_requests: int
    num_failed: int
    num_aborted: int
    prompt_tokens: int
    output_tokens: int
    output_throughput: float | None
    request_throughput: float | None
    ratio_to_baseline: Ratio
    cycle_share: float | None
    rounds: list[RoundResult]


class ResultDocument(TypedDict):
    """The whole file."""

    format: str
    version: int
    complete: bool
    stopped_by: str | None
    baseline: str
    spec: dict[str, Any]
    environment: dict[str, Any]
    policies: dict[str, PolicyResult]
    warnings: list[str]


def check_document(data: object, source: str) -> ResultDocument:
    """Return ``data`` as a result document of this version.

    Raises:
        InputError: it is something else, newer than this program, or lacks a part.
    """
    if not isinstance(data, dict) or data.get("format") != RESULT_FORMAT:
        raise InputError(f"{source} is not a specbench result file")
    version = data.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise InputError(f"{source} carries no valid format version (found {version!r})")
    if version > RESULT_VERSION:
        raise InputError(
            f"{source} has format version {version}; this specbench reads up to "
            f"{RESULT_VERSION}: update specbench"
        )
    _require(data, ResultDocument.__required_keys__, source)
    if not isinstance(data["policies"], dict):
        raise InputError(f"{source} is damaged: 'policies' is not an object")
    for label, policy in data["policies"].items():
        if not isinstance(policy, dict):
            raise InputError(f"{source} is damaged: policies.{label} is not an object")
        _require(policy, PolicyResult.__required_keys__, f"{source}, policies.{label},")
    document: Any = data
    return document  # type: ignore[no-any-return]


def _require(data: dict[str, Any], keys: frozenset[str], source: str) -> None:
    missing = sorted(keys - data.keys())
    if missing:
        raise InputError(f"{source} is damaged: it lacks {', '.join(missing)}")
