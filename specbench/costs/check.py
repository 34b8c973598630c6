"""How well a cost table foretells steps that were measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from specbench.costs.table import CostTable


class MeasuredStep(NamedTuple):
    """What a step did, and how long it took.

    Attributes:
        policy: in force.
        context_tokens: mean context length of the batch.
        num_tokens: tokens of the target's pass.
        num_drafted_tokens: drafted in the step.
        num_emitted_tokens: accepted ones and bonus tokens.
        step_ms: measured duration.
    """

    policy: str
    context_tokens: float
    num_tokens: int
    num_drafted_tokens: int
    num_emitted_tokens: int
    step_ms: float


class PolicyCheck(NamedTuple):
    """All steps of one policy: sums, milliseconds and tokens."""

    policy: str
    num_steps: int
    num_emitted_tokens: int
    measured_ms: float
    predicted_ms: float

    @property
    def measured_tokens_per_s(self) -> float:
        """Emitted per second spent in steps."""
        return 1000.0 * self.num_emitted_tokens / self.measured_ms

    @property
    def predicted_tokens_per_s(self) -> float:
        """The same, had every step taken as long as the table says."""
        return 1000.0 * self.num_emitted_tokens / self.predicted_ms


def predicted_step_ms(table: CostTable, step: MeasuredStep) -> float:
    """What the table makes of a step: draft(D) + verify(T) at its context length."""
    draft_ms, verify_ms = table.dense(step.context_tokens, step.num_tokens, step.num_drafted_tokens)
    return float(draft_ms[-1] + verify_ms[-1])


def check_table(table: CostTable, steps: Iterable[MeasuredStep]) -> list[PolicyCheck]:
    """Measured and predicted time by policy, in the order in which policies first appear."""
    found: dict[str, PolicyCheck] = {}
    for step in steps:
        before = found.get(step.policy, PolicyCheck(step.policy, 0, 0, 0.0, 0.0))
        found[step.policy] = PolicyCheck(
            step.policy,
            before.num_steps + 1,
            before.num_emitted_tokens + step.num_emitted_tokens,
            before.measured_ms + step.step_ms,
            before.predicted_ms + predicted_step_ms(table, step),
        )
    return list(found.values())
