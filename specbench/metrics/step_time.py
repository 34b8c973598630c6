"""Where the time of an engine step went, from the worker's step records.

Only steps followed directly by another one count: the last step before an idle period has
no measured length (``step_ms`` is None), and using its parts alone would skew the shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbench.records import StepRecord


@dataclass(frozen=True)
class StepShares:
    """Shares of step time, adding up to 1.

    Attributes:
        draft: proposing tokens, the drafter's context keys and values included.
        verify: target forward pass, logits and sampling.
        decide: sizing and sharing out the verification budget.
        other: scheduling, input preparation, output handling.
    """

    draft: float
    verify: float
    decide: float
    other: float


def mean_step_ms(steps: Sequence[StepRecord]) -> float | None:
    """Mean time from one step's start to the next one's, in milliseconds."""
    lengths = [step.step_ms for step in steps if step.step_ms is not None]
    return sum(lengths) / len(lengths) if lengths else None


def step_shares(steps: Sequence[StepRecord]) -> StepShares | None:
    """Share of total step time in each part; None without a measured step."""
    timed = [step for step in steps if step.step_ms is not None]
    total_ms = sum(step.step_ms or 0.0 for step in timed)
    if total_ms <= 0:
        return None
    draft = sum(step.draft_ms for step in timed) / total_ms
    verify = sum(step.verify_ms for step in timed) / total_ms
    decide = sum(step.decide_ms for step in timed) / total_ms
    return StepShares(draft, verify, decide, 1.0 - draft - verify - decide)
