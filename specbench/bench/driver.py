"""Closed-loop load: a fixed number of conversations in flight, each turn after the last.

Times are the client's, on one monotonic clock. What is slow in the client (tokenizing a
follow-up turn) happens before ``sent_s`` and is visible as ``sent_s - intended_s``.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from specbench.bench.events import OnEvent, RequestDone, RoundDone, RoundStarted, ignore_event
from specbench.bench.plan import num_turns, policy_of_label, seed_offsets
from specbench.bench.prompts import check_fit, encode_first_turns, encode_turn, output_limit
from specbench.bench.waiting import run_all, run_unless_stopped
from specbench.engines.base import Engine
from specbench.errors import EngineFailure, SpecbenchError
from specbench.records import (
    Chunk,
    Conversation,
    EngineRequest,
    RequestRecord,
    RoundRecord,
    SamplingSpec,
)

Clock = Callable[[], float]


async def run_round(
    engine: Engine,
    policy: str,
    conversations: Sequence[Conversation],
    *,
    max_concurrency: int,
    sampling: SamplingSpec,
    round_index: int = 0,
    warmup: bool = False,
    on_event: OnEvent = ignore_event,
    stop: asyncio.Event | None = None,
    first_prompts: Mapping[str, tuple[int, ...]] | None = None,
    offsets: Mapping[str, int] | None = None,
    clock: Clock = time.perf_counter,
) -> RoundRecord:
    """Serve every conversation once under one policy.

    Args:
        policy: label; the engine is switched to the policy behind it first.
        max_concurrency: conversations in flight while enough are left.
        stop: setting it aborts what is in flight; the record is then incomplete.
        first_prompts: item id -> tokens of the first turn, if already encoded.
        offsets: item id -> seed offset (:func:`seed_offsets` of the whole workload);
            defaults to the offsets within ``conversations``.

    Returns:
        One request record for every turn that was begun. A failing request carries its
        error and fails the later turns of its conversation; others go on. A dead engine
        ends the round: ``complete`` is False and ``failure`` says why.

    Raises:
        InputError: a prompt does not fit the engine's context; nothing was sent.
    """
    if first_prompts is None:
        check_fit(engine, conversations, sampling)
        first_prompts = encode_first_turns(engine, conversations)
    load = _ClosedLoop(
        engine=engine,
        policy=policy,
        round_index=round_index,
        warmup=warmup,
        sampling=sampling,
        on_event=on_event,
        clock=clock,
        first_prompts=first_prompts,
        offsets=seed_offsets(conversations) if offsets is None else offsets,
        waiting=deque(conversations),
    )
    return await load.run(max_concurrency, stop or asyncio.Event())


@dataclass
class _ClosedLoop:
    engine: Engine
    policy: str
    round_index: int
    warmup: bool
    sampling: SamplingSpec
    on_event: OnEvent
    clock: Clock
    first_prompts: Mapping[str, tuple[int, ...]]
    offsets: Mapping[str, int]
    waiting: deque[Conversation]
    records: list[RequestRecord] = field(default_factory=list)

    async def run(self, max_concurrency: int, stop: asyncio.Event) -> RoundRecord:
        num_requests = sum(num_turns(item) for item in self.waiting)
        num_slots = min(max_concurrency, len(self.waiting))
        failure: str | None = None
        ended = False
        try:
            ended, _ = await run_unless_stopped(stop, self._switch_policy())
            if ended:
                self.on_event(
                    RoundStarted(self.policy, self.round_index, self.warmup, num_requests)
                )
                serving = run_all(self._slot() for _ in range(num_slots))
                ended, _ = await run_unless_stopped(stop, serving)
        except EngineFailure as error:
            failure = str(error)
        record = await self._finish(complete=ended and failure is None, failure=failure)
        self.on_event(RoundDone(record))
        return record

    async def _switch_policy(self) -> None:
        await self.engine.set_policy(policy_of_label(self.policy))
        # Steps of whatever ran before (profiling, start-up) are not this round's.
        await self.engine.take_steps()

    async def _finish(self, complete: bool, failure: str | None) -> RoundRecord:
        steps = []
        if failure is None:
            try:
                steps = await self.engine.take_steps()
            except EngineFailure as error:
                complete, failure = False, str(error)
        now = self.clock()
        return RoundRecord(
            policy=self.policy,
            round_index=self.round_index,
            warmup=self.warmup,
            started_s=min((r.sent_s for r in self.records), default=now),
            finished_s=max((r.finished_s for r in self.records), default=now),
            requests=tuple(self.records),
            steps=tuple(steps),
            complete=complete,
            failure=failure,
        )

    async def _slot(self) -> None:
        """Serve conversations one after the other until none is waiting."""
        while self.waiting:
            await self._converse(self.waiting.popleft())

    async def _converse(self, conversation: Conversation) -> None:
        replies: list[str] = []
        failed_turn: int | None = None
        for turn in range(num_turns(conversation)):
            blank = self._blank_record(conversation, turn)
            if failed_turn is not None:
                self._add(replace(blank, error=f"not sent: turn {failed_turn} failed"))
                continue
            record = await self._ask(conversation, turn, replies, blank)
            if record.error is not None:
                failed_turn = turn
            else:
                replies.append(self.engine.decode(list(record.output_token_ids)))

    async def _ask(
        self, conversation: Conversation, turn: int, replies: list[str], blank: RequestRecord
    ) -> RequestRecord:
        """Send one request and record it, however it ends."""
        chunks: list[Chunk] = []
        error: str | None = None
        finish: str | None = None
        sent = blank
        try:
            request = self._request(conversation, turn, replies, blank.request_id)
            sent = replace(
                blank, num_prompt_tokens=len(request.prompt_token_ids), sent_s=self.clock()
            )
            await self._collect(request, chunks)
        except asyncio.CancelledError:
            error, finish = "aborted: the round was stopped", "abort"
            raise
        except EngineFailure as failure:
            error = str(failure)
            raise
        except SpecbenchError as refusal:
            error = str(refusal)
        except Exception as unexpected:
            # One odd request must not cost the others' measurements; the record keeps it.
            error = f"{type(unexpected).__name__}: {unexpected}"
        finally:
            record = _recorded(sent, chunks, error, finish, self.clock())
            self._add(record)
        return record

    async def _collect(self, request: EngineRequest, chunks: list[Chunk]) -> None:
        stream = self.engine.generate(request)
        try:
            async for chunk in stream:
                chunks.append(chunk)
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()

    def _request(
        self, conversation: Conversation, turn: int, replies: list[str], request_id: str
    ) -> EngineRequest:
        first = self.first_prompts.get(conversation.item_id) if turn == 0 else None
        seed = self.sampling.seed + self.offsets[conversation.item_id] + turn
        return EngineRequest(
            request_id=request_id,
            prompt_token_ids=first or encode_turn(self.engine, conversation, turn, replies),
            sampling=replace(self.sampling, seed=seed),
            max_tokens=output_limit(conversation, self.sampling),
        )

    def _blank_record(self, conversation: Conversation, turn: int) -> RequestRecord:
        now = self.clock()
        kind = "warmup" if self.warmup else f"r{self.round_index}"
        return RequestRecord(
            request_id=f"{self.policy}/{kind}/{conversation.item_id}/{turn}",
            item_id=conversation.item_id,
            turn=turn,
            policy=self.policy,
            round_index=self.round_index,
            warmup=self.warmup,
            num_prompt_tokens=0,
            intended_s=now,
            sent_s=now,
            finished_s=now,
            chunk_times_s=(),
            chunk_tokens=(),
            output_token_ids=(),
            finish_reason=None,
        )

    def _add(self, record: RequestRecord) -> None:
        self.records.append(record)
        self.on_event(RequestDone(record))


def _recorded(
    sent: RequestRecord,
    chunks: Sequence[Chunk],
    error: str | None,
    finish_reason: str | None,
    now_s: float,
) -> RequestRecord:
    """Complete ``sent`` with what arrived; a request that ended well ends with its last chunk."""
    with_tokens = [chunk for chunk in chunks if chunk.token_ids]
    ended_well = error is None and bool(chunks)
    return replace(
        sent,
        finished_s=chunks[-1].time_s if ended_well else now_s,
        chunk_times_s=tuple(chunk.time_s for chunk in with_tokens),
        chunk_tokens=tuple(len(chunk.token_ids) for chunk in with_tokens),
        output_token_ids=tuple(token for chunk in with_tokens for token in chunk.token_ids),
        finish_reason=finish_reason or (chunks[-1].finish_reason if chunks else None),
        error=error,
    )
