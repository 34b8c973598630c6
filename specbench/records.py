"""What is planned (Spec) and what was measured (Record): plain frozen data, no behaviour.

Format history of everything written from these types (``FORMAT_VERSION``):

1  first version.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

FORMAT_VERSION = 1

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True)
class Message:
    """One chat message."""

    role: Role
    content: str


@dataclass(frozen=True)
class Conversation:
    """One workload item: scripted history, then one or more user turns.

    Turn ``k`` is sent as: history, turns[0], the model's reply, ..., turns[k]. An item
    with ``text`` set instead of turns is a raw completion prompt without chat template.

    Attributes:
        item_id: unique within its workload, stable across runs.
        category: sub-task label for grouping; free text.
        max_tokens: output limit this item wants; None takes the run's.
    """

    item_id: str
    turns: tuple[str, ...] = ()
    history: tuple[Message, ...] = ()
    text: str | None = None
    category: str = ""
    max_tokens: int | None = None


@dataclass(frozen=True)
class SamplingSpec:
    """Sampling of every request of a run. ``seed`` is the base: request i uses seed + i."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 128
    ignore_eos: bool = False
    seed: int = 0


@dataclass(frozen=True)
class EngineRequest:
    """One request as the engine receives it: tokens in, sampling, an id."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingSpec
    max_tokens: int


@dataclass(frozen=True)
class Chunk:
    """What one engine step emitted for one request.

    Attributes:
        token_ids: new tokens, possibly several under speculation, possibly none at the end.
        time_s: monotonic clock (``time.perf_counter``) when the client saw it.
        finish_reason: set on the last chunk ("stop", "length", "abort").
    """

    token_ids: tuple[int, ...]
    time_s: float
    finish_reason: str | None = None


@dataclass(frozen=True)
class RequestRecord:
    """One request as the client saw it; times on one monotonic clock, in seconds.

    Attributes:
        intended_s: when the load generator meant to send it (closed loop: slot free).
        sent_s: when it was handed to the engine.
        chunk_times_s, chunk_tokens: one entry for every chunk with at least one token.
        error: why it failed, None if it finished.
    """

    request_id: str
    item_id: str
    turn: int
    policy: str
    round_index: int
    warmup: bool
    num_prompt_tokens: int
    intended_s: float
    sent_s: float
    finished_s: float
    chunk_times_s: tuple[float, ...]
    chunk_tokens: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    finish_reason: str | None
    error: str | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens the client received."""
        return sum(self.chunk_tokens)


@dataclass(frozen=True)
class StepRecord:
    """One engine step, measured inside the worker. Durations in milliseconds.

    Attributes:
        num_requests: requests in the batch.
        num_decoding: requests that sampled at least one token.
        num_prompt_tokens: prefill tokens computed.
        num_verified_tokens: draft tokens the target checked in this step.
        num_accepted_tokens: of those, how many were kept.
        num_emitted_tokens: accepted plus one bonus per sampling request.
        num_drafted_tokens: tokens drafted at the end of this step, for the next one.
        num_requests_verified: requests that had at least one draft token checked.
        step_ms: start of this step to start of the next, idle time excluded (None: idle after).
        verify_ms: building the inputs, target forward, logits and sampling.
        draft_ms: drafting, including the drafter's context keys and values.
        decide_ms: policy decisions (budget, allocation).
        context_tokens: mean context length of the batch.
        accepted_per_request, verified_per_request: per request with drafts, batch order.
        drafted_per_request: of ``num_drafted_tokens``, per request of the batch, in its order;
            empty if nothing was drafted.
        predicted_survival: per request of the batch and position of a block, as predicted
            before drafting; empty unless the policy sizes drafts.
        shown_survival: the same as the drafter's confidences had it afterwards, 0 where
            nothing was drafted; empty if nothing was.
    """

    num_requests: int
    num_decoding: int
    num_prompt_tokens: int
    num_verified_tokens: int
    num_accepted_tokens: int
    num_emitted_tokens: int
    num_drafted_tokens: int
    num_requests_verified: int
    step_ms: float | None
    verify_ms: float
    draft_ms: float
    decide_ms: float
    context_tokens: float
    accepted_per_request: tuple[int, ...] = ()
    verified_per_request: tuple[int, ...] = ()
    drafted_per_request: tuple[int, ...] = ()
    predicted_survival: tuple[tuple[float, ...], ...] = ()
    shown_survival: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class RoundRecord:
    """One policy's share of one round: every request of the workload slice once.

    Attributes:
        started_s, finished_s: first send and last finish, on the requests' clock.
        complete: False when the round was cut short (stopped by the user, engine died).
        failure: why the engine stopped serving, None if it did not.
    """

    policy: str
    round_index: int
    warmup: bool
    started_s: float
    finished_s: float
    requests: tuple[RequestRecord, ...]
    steps: tuple[StepRecord, ...]
    complete: bool = True
    failure: str | None = None

    @property
    def duration_s(self) -> float:
        """Wall time from the first send to the last finish."""
        return self.finished_s - self.started_s


@dataclass(frozen=True)
class RunSpec:
    """What a run or comparison was asked to do; written beside its results.

    Attributes:
        policies: labels, the baseline first; a policy listed twice is told apart by a
            ``#2`` suffix, which is no part of the policy's name.
        num_prompts: workload items, dealt out over the rounds.
        warmup_prompts: items that every policy serves once, unmeasured, before round 0.
    """

    policies: tuple[str, ...]
    workload: str
    max_concurrency: int
    num_prompts: int
    rounds: int
    sampling: SamplingSpec
    seed: int
    model: str
    drafter: str | None
    engine_args: dict[str, Any] = field(default_factory=dict)
    warmup_prompts: int = 0
