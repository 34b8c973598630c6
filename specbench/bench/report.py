"""The result document of a run, and the plain-word warnings that belong beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from specbench.bench.plan import policy_of_label
from specbench.bench.summary import summarize_policy
from specbench.records import RoundRecord, RunSpec
from specbench.results.document import (
    RESULT_FORMAT,
    RESULT_VERSION,
    PolicyResult,
    ResultDocument,
)
from specbench.results.environment import redact

# Above this share of output inside repeated cycles, copying drafters look better than they
# would on a model that does not loop; the built-in chat workload is chosen to stay below.
MAX_CYCLE_SHARE = 0.05
# Half-width of an interval, relative to its ratio, beyond which most comparisons of
# policies (a few to some ten percent apart) cannot be told from noise.
WIDE_INTERVAL = 0.10


def build_document(
    spec: RunSpec,
    rounds: Sequence[RoundRecord],
    environment: dict[str, Any],
    stopped_by: str | None = None,
) -> ResultDocument:
    """Everything a run found.

    Args:
        environment: see :func:`specbench.results.environment.describe_environment`.
        stopped_by: why the run ended early; None if it was completed.
    """
    baseline = spec.policies[0]
    policies = {
        label: summarize_policy(policy_of_label(label), label, rounds, baseline)
        for label in spec.policies
    }
    return ResultDocument(
        format=RESULT_FORMAT,
        version=RESULT_VERSION,
        complete=stopped_by is None,
        stopped_by=stopped_by,
        baseline=baseline,
        spec=redact(asdict(spec)),
        environment=environment,
        policies=policies,
        warnings=_warnings(spec, policies, stopped_by),
    )


def _warnings(
    spec: RunSpec, policies: dict[str, PolicyResult], stopped_by: str | None
) -> list[str]:
    warnings = []
    if stopped_by is not None:
        warnings.append(f"partial result: {stopped_by}")
    per_round = spec.num_prompts // spec.rounds
    if per_round < spec.max_concurrency:
        warnings.append(
            f"a round has {per_round} prompts, fewer than --max-concurrency "
            f"{spec.max_concurrency}: that concurrency was never reached; use more prompts or "
            "fewer rounds"
        )
    if len(policies) > 1 and spec.rounds == 1:
        warnings.append("one round shows no spread: no intervals; use --rounds 3 or more")
    for label, policy in policies.items():
        warnings += _policy_warnings(label, policy)
    return warnings


def _policy_warnings(label: str, policy: PolicyResult) -> list[str]:
    warnings = []
    if policy["num_failed"]:
        warnings.append(
            f"{label}: {policy['num_failed']} of {policy['num_requests']} requests failed and "
            "do not count; its figures rest on other work than the others'"
        )
    ratio = policy["ratio_to_baseline"]
    if ratio["value"] is not None and ratio["ci95"] is not None:
        low, high = ratio["ci95"]
        if (high - low) / 2 > WIDE_INTERVAL * ratio["value"]:
            warnings.append(
                f"{label}: the rounds disagree (ratio {low:.2f} to {high:.2f}); use more rounds, "
                "more prompts or a quieter machine"
            )
    share = policy["cycle_share"]
    if share is not None and share > MAX_CYCLE_SHARE:
        warnings.append(
            f"{label}: {share:.0%} of the output repeats itself in cycles, which flatters "
            "drafters that copy"
        )
    return warnings
