"""What each engine step did and how long it took, collected without waiting for the device."""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from specbench.vllm_plugin.clock import DeviceClock

# Steps kept when nobody fetches them (a server that runs for days): about 20 minutes of
# steps at 13 ms each.
MAX_STEPS = 100_000

# What a step spends time on. Decisions are made inside the other two, and counted apart.
Part = Literal["verify", "draft", "verify_decision", "draft_decision"]


@dataclass
class PendingStep:
    """One step's marks and tensors, resolved to plain numbers when it is fetched."""

    request_ids: list[str]
    start: Any
    num_prompt_tokens: int = 0
    context_tokens: float = 0.0
    spans: dict[Part, list[tuple[Any, Any]]] = field(default_factory=lambda: defaultdict(list))
    num_sampled: torch.Tensor | None = None  # [num_reqs]
    num_rejected: torch.Tensor | None = None  # [num_reqs]
    draft_lengths: torch.Tensor | None = None  # [num_reqs]
    predicted_survival: torch.Tensor | None = None  # [num_reqs, block]
    shown_survival: torch.Tensor | None = None  # [num_reqs, block]
    next_start: Any = None


class StepLog:
    """Collects steps; ``take`` returns and forgets them.

    A step lasts from its start to the start of the next one, unless every request of it
    had finished by then: the gap is then idle time, and the step's duration unknown.
    """

    def __init__(self, clock: DeviceClock) -> None:
        self.clock = clock
        self.current: PendingStep | None = None
        self._steps: deque[PendingStep] = deque(maxlen=MAX_STEPS)

    def begin(self, request_ids: list[str], finished: set[str]) -> PendingStep:
        """Open the next step and close the previous one."""
        step = PendingStep(request_ids, self.clock.mark())
        previous = self.current
        if previous is not None and not set(previous.request_ids) <= finished:
            previous.next_start = step.start
        self.current = step
        self._steps.append(step)
        return step

    @contextlib.contextmanager
    def span(self, part: Part) -> Iterator[None]:
        """Count the block's duration as this part of the current step, if there is one."""
        start = self.clock.mark()
        yield
        if self.current is not None:
            self.current.spans[part].append((start, self.clock.mark()))

    def pause(self) -> None:
        """No request is left: the next step does not close the last one."""
        self.current = None

    def take(self, *, include_open: bool) -> list[dict[str, Any]]:
        """Steps since the last call, oldest first, as keyword arguments of StepRecord.

        Args:
            include_open: also the last step, whose duration is unknown until another one
                starts; without it that step is kept for the next call.
        """
        taken = list(self._steps)
        self._steps.clear()
        if include_open:
            self.current = None
        elif taken and taken[-1] is self.current:
            self._steps.append(taken.pop())
        return [self._resolve(step) for step in taken if step.num_sampled is not None]

    def _resolve(self, step: PendingStep) -> dict[str, Any]:
        assert step.num_sampled is not None
        sampled = step.num_sampled.tolist()
        rejected = (
            step.num_rejected.tolist() if step.num_rejected is not None else [0] * len(sampled)
        )
        verified = [s + r - 1 if s > 0 else 0 for s, r in zip(sampled, rejected, strict=True)]
        with_drafts = [(s - 1, v) for s, v in zip(sampled, verified, strict=True) if v > 0]
        step_ms = None
        if step.next_start is not None:
            step_ms = self.clock.elapsed_ms(step.start, step.next_start)
        drafted = [] if step.draft_lengths is None else step.draft_lengths.tolist()
        num_drafted = sum(drafted)
        parts: tuple[Part, ...] = get_args(Part)
        ms = {part: self._total_ms(step.spans[part]) for part in parts}
        return {
            "num_requests": len(sampled),
            "num_decoding": sum(s > 0 for s in sampled),
            "num_prompt_tokens": step.num_prompt_tokens,
            "num_verified_tokens": sum(verified),
            "num_accepted_tokens": sum(a for a, _ in with_drafts),
            "num_emitted_tokens": sum(sampled),
            "num_drafted_tokens": num_drafted,
            "num_requests_verified": len(with_drafts),
            "step_ms": step_ms,
            "verify_ms": ms["verify"] - ms["verify_decision"],
            "draft_ms": ms["draft"] - ms["draft_decision"],
            "decide_ms": ms["verify_decision"] + ms["draft_decision"],
            "context_tokens": step.context_tokens,
            "accepted_per_request": [a for a, _ in with_drafts],
            "verified_per_request": [v for _, v in with_drafts],
            "drafted_per_request": drafted if num_drafted else [],
            "predicted_survival": _rows(step.predicted_survival),
            "shown_survival": _rows(step.shown_survival) if num_drafted else [],
        }

    def _total_ms(self, marks: list[tuple[Any, Any]]) -> float:
        return sum(self.clock.elapsed_ms(start, end) for start, end in marks)


def _rows(survival: torch.Tensor | None) -> list[list[float]]:
    return [] if survival is None else survival.tolist()
