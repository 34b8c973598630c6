"""A whole comparison on the fake engine, in virtual time: known ratios come out exactly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from specbench.bench.compare import compare
from specbench.bench.events import Event, RequestDone, RoundDone, RoundStarted
from specbench.bench.report import build_document
from specbench.bench.session import Outcome, run_session
from specbench.engines.fake import FakeBehaviour, FakeEngine, run_virtually
from specbench.errors import EngineFailure, InputError, Interrupted, SpecbenchError
from specbench.records import Conversation, RoundRecord, RunSpec, SamplingSpec
from specbench.results.document import ResultDocument, check_document

PLAIN = FakeBehaviour(first_token_s=0.4, chunk_s=0.1)
# Five chunks fewer for ten tokens and the same time for the first: twice as fast after it.
SPECULATIVE = FakeBehaviour(
    chunk_tokens=(1, 3),
    first_token_s=0.2,
    chunk_s=0.15,
    num_verified_tokens=4,
    draft_share=0.25,
)
BEHAVIOURS = {"ar": PLAIN, "dspark": SPECULATIVE}
SPEC = RunSpec(
    policies=("ar", "dspark"),
    workload="test",
    max_concurrency=2,
    num_prompts=12,
    rounds=3,
    sampling=SamplingSpec(max_tokens=10),
    seed=0,
    model="fake",
    drafter=None,
    warmup_prompts=2,
)
PROMPTS = [Conversation(f"p{i}", turns=("one two",)) for i in range(12)]


def measure(
    engine: FakeEngine,
    spec: RunSpec = SPEC,
    on_event: Callable[[Event], None] = lambda event: None,
    stop_after_s: float | None = None,
) -> tuple[list[RoundRecord], SpecbenchError | None]:
    async def main(clock):  # type: ignore[no-untyped-def]
        engine.clock = clock
        stop = asyncio.Event()
        if stop_after_s is not None:
            asyncio.get_running_loop().call_later(stop_after_s, stop.set)
        rounds = []
        try:
            async for record in compare(
                engine, spec, PROMPTS, on_event=on_event, stop=stop, clock=clock
            ):
                rounds.append(record)
        except SpecbenchError as error:
            return rounds, error
        return rounds, None

    return run_virtually(main)


def document_of(engine: FakeEngine, spec: RunSpec = SPEC) -> ResultDocument:
    rounds, error = measure(engine, spec)
    return build_document(spec, rounds, {}, None if error is None else str(error))


def test_known_throughputs_and_ratio() -> None:
    policies = document_of(FakeEngine(BEHAVIOURS))["policies"]
    ar, dspark = policies["ar"], policies["dspark"]
    # Two at a time, 4 prompts a round: 1.3 s and 0.65 s for ten tokens each.
    assert ar["output_throughput"] == pytest.approx(20 / 1.3)
    assert dspark["output_throughput"] == pytest.approx(20 / 0.65)
    assert ar["ratio_to_baseline"] == {"value": 1.0, "ci95": None}
    assert dspark["ratio_to_baseline"]["value"] == pytest.approx(2.0)
    assert dspark["ratio_to_baseline"]["ci95"] == pytest.approx([2.0, 2.0])
    assert ar["output_tokens"] == dspark["output_tokens"] == 120
    assert ar["num_rounds"] == 3
    assert ar["num_requests"] == 12
    assert ar["request_throughput"] == pytest.approx(2 / 1.3)


def test_known_latencies_and_acceptance() -> None:
    policies = document_of(FakeEngine(BEHAVIOURS))["policies"]
    ar, dspark = policies["ar"], policies["dspark"]
    assert ar["ttft_ms"] is not None
    assert ar["ttft_ms"]["p99"] == pytest.approx(400)
    assert dspark["tpot_ms"] is not None
    assert dspark["tpot_ms"]["median"] == pytest.approx(50)
    assert dspark["itl_ms"] is not None
    assert dspark["itl_ms"]["mean"] == pytest.approx(50)
    assert dspark["itl_per_chunk_ms"] is not None
    assert dspark["itl_per_chunk_ms"]["mean"] == pytest.approx(150)
    assert ar["acceptance_length"] is None
    assert ar["acceptance_length_per_step"] == 1
    assert dspark["acceptance_length"] == pytest.approx(3.0)
    assert dspark["acceptance_length_per_step"] == pytest.approx(10 / 4)
    assert dspark["verified_tokens"] == 12 * 3 * 4
    assert dspark["accepted_tokens"] == 12 * 3 * 2
    assert dspark["drafted_tokens"] == 12 * 4 * 4
    assert dspark["draft_share"] == pytest.approx(0.25)
    assert ar["draft_share"] == 0
    # The fake model counts upwards and never repeats itself.
    assert dspark["cycle_share"] == 0


def test_warmups_are_recorded_and_flagged_but_count_for_nothing() -> None:
    engine = FakeEngine(BEHAVIOURS)
    rounds, _ = measure(engine)
    assert [r.warmup for r in rounds] == [True, True] + [False] * 6
    assert sum(len(r.requests) for r in rounds if r.warmup) == 4
    with_warmup = build_document(SPEC, rounds, {})
    without = build_document(SPEC, rounds[2:], {})
    assert with_warmup == without


def test_policies_are_switched_and_interleaved() -> None:
    engine = FakeEngine(BEHAVIOURS)
    measure(engine)
    assert engine.policies_set[:2] == ["ar", "dspark"]
    pairs = list(zip(engine.policies_set[2::2], engine.policies_set[3::2], strict=True))
    assert {frozenset(pair) for pair in pairs} == {frozenset({"ar", "dspark"})}
    assert pairs[0] != pairs[1]
    assert pairs[0] == pairs[2]


def test_policies_see_the_same_prompts_and_seeds() -> None:
    engine = FakeEngine(BEHAVIOURS)
    measure(engine)
    seen: dict[str, dict[str, tuple[object, int]]] = {"ar": {}, "dspark": {}}
    for request in engine.requests:
        policy, _, rest = request.request_id.partition("/")
        seen[policy][rest] = (request.prompt_token_ids, request.sampling.seed)
    assert seen["ar"] == seen["dspark"]
    assert len(seen["ar"]) == 12 + 2


def test_same_policy_twice() -> None:
    spec = replace(SPEC, policies=("dspark", "dspark#2"))
    engine = FakeEngine(BEHAVIOURS)
    document = document_of(engine, spec)
    assert set(engine.policies_set) == {"dspark"}
    second = document["policies"]["dspark#2"]
    assert second["policy"] == "dspark"
    assert second["ratio_to_baseline"]["value"] == pytest.approx(1.0)


def test_document_is_valid_json_and_passes_its_own_check() -> None:
    document = document_of(FakeEngine(BEHAVIOURS))
    assert check_document(json.loads(json.dumps(document, allow_nan=False)), "x") == document
    assert document["complete"]
    assert document["baseline"] == "ar"
    assert document["warnings"] == []
    rounds = document["policies"]["dspark"]["rounds"]
    assert [r["round"] for r in rounds] == [0, 1, 2]
    assert all(r["ratio_to_baseline"] == pytest.approx(2.0) for r in rounds)


def test_events_tell_the_story_in_order() -> None:
    events: list[Event] = []
    measure(FakeEngine(BEHAVIOURS), on_event=events.append)
    started = [e for e in events if isinstance(e, RoundStarted)]
    done = [e for e in events if isinstance(e, RoundDone)]
    assert len(started) == len(done) == 8
    assert sum(e.num_requests for e in started) == sum(isinstance(e, RequestDone) for e in events)


def test_stop_keeps_complete_rounds_and_marks_the_cut_one() -> None:
    # Warm-ups take 1.3 + 0.65 s, a round 2.6 + 1.3 s: 6.4 s is early in round 1.
    rounds, error = measure(FakeEngine(BEHAVIOURS), stop_after_s=6.4)
    assert isinstance(error, Interrupted)
    assert [r.complete for r in rounds] == [True] * 4 + [False]
    document = build_document(SPEC, rounds, {}, str(error))
    assert not document["complete"]
    assert document["stopped_by"] == "stopped by the user"
    assert "partial result" in document["warnings"][0]
    cut = rounds[-1].policy
    assert [r["complete"] for r in document["policies"][cut]["rounds"]] == [True, False]
    dspark = document["policies"]["dspark"]
    assert dspark["ratio_to_baseline"]["value"] == pytest.approx(2.0)
    assert dspark["ratio_to_baseline"]["ci95"] is None
    assert dspark["num_rounds"] == document["policies"]["ar"]["num_rounds"] == 1


def test_stop_in_the_first_round_still_says_what_there_is() -> None:
    # 3.5 s: round 0 has run for 1.55 s, so a pair of ar or two pairs of dspark are done.
    rounds, error = measure(FakeEngine(BEHAVIOURS), stop_after_s=3.5)
    document = build_document(SPEC, rounds, {}, str(error))
    measured = [p for p in document["policies"].values() if p["num_requests"]]
    assert measured
    assert all(p["output_throughput"] is not None for p in measured)
    assert document["policies"]["dspark"]["ratio_to_baseline"]["value"] is None


def test_dead_engine_keeps_what_was_measured() -> None:
    # 4 warm-up requests, 8 of round 0, and round 1 begins.
    rounds, error = measure(FakeEngine(BEHAVIOURS, die_after_requests=14))
    assert isinstance(error, EngineFailure)
    assert [r.complete for r in rounds] == [True] * 4 + [False]
    assert rounds[-1].failure is not None


def test_policy_whose_every_request_fails_ends_the_run_with_the_reason() -> None:
    rounds, error = measure(FakeEngine(BEHAVIOURS, refuse=("dspark/",)))
    assert error is not None
    assert str(error).startswith("every request under policy 'dspark' failed: request dspark/")
    assert len(rounds) == 2


def test_warnings_name_failures_thin_rounds_and_missing_spread() -> None:
    engine = FakeEngine(BEHAVIOURS, refuse=("dspark/r0/p0/",))
    spec = replace(SPEC, rounds=1, max_concurrency=16)
    warnings = " | ".join(document_of(engine, spec)["warnings"])
    assert "12 prompts, fewer than --max-concurrency 16" in warnings
    assert "one round shows no spread" in warnings
    assert "dspark: 1 of 12 requests failed" in warnings


def test_disagreeing_rounds_and_looping_output_are_warned_about() -> None:
    rounds, _ = measure(FakeEngine(BEHAVIOURS))
    slow = [
        replace(r, finished_s=r.finished_s + 1.0) if r.policy == "dspark" and i % 2 else r
        for i, r in enumerate(rounds)
    ]
    looping = [
        replace(r, requests=tuple(replace(q, output_token_ids=(7,) * 10) for q in r.requests))
        for r in slow
    ]
    warnings = " | ".join(build_document(SPEC, looping, {})["warnings"])
    assert "dspark: the rounds disagree" in warnings
    assert "ar: 90% of the output repeats itself" in warnings


def run_fake_session(engine: FakeEngine, **arguments: object) -> Outcome:
    async def start() -> FakeEngine:
        return engine

    async def main(clock):  # type: ignore[no-untyped-def]
        engine.clock = clock
        return await run_session(start, SPEC, PROMPTS, **arguments)  # type: ignore[arg-type]

    return run_virtually(main)


def test_session_closes_the_engine_and_hands_over_its_description() -> None:
    engine = FakeEngine(BEHAVIOURS)
    outcome = run_fake_session(engine)
    assert engine.closed
    assert outcome.stopped_by is None
    assert outcome.measured_anything
    assert outcome.engine_description["engine"] == "fake"
    assert len(outcome.rounds) == 8


def test_session_turns_engine_death_into_an_outcome() -> None:
    engine = FakeEngine(BEHAVIOURS, die_after_requests=1)
    outcome = run_fake_session(engine)
    assert engine.closed
    assert isinstance(outcome.stopped_by, EngineFailure)
    assert not outcome.measured_anything


def test_session_refuses_prompts_that_do_not_fit_and_closes_the_engine() -> None:
    engine = FakeEngine(BEHAVIOURS, max_model_len=5)
    with pytest.raises(InputError, match="does not fit"):
        run_fake_session(engine)
    assert engine.closed
    assert engine.requests == []


def test_stop_during_engine_start_leaves_nothing_behind() -> None:
    cleaned: list[bool] = []

    async def slow_start() -> FakeEngine:
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append(True)
        return FakeEngine()

    async def main(clock):  # type: ignore[no-untyped-def]
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(1.0, stop.set)
        await run_session(slow_start, SPEC, PROMPTS, stop=stop)

    with pytest.raises(Interrupted, match="before anything was measured"):
        run_virtually(main)
    assert cleaned == [True]
