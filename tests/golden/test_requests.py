"""The instrument against an engine whose every token and time is known.

Time is virtual, so latencies are asserted exactly (up to rounding), not as bounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from specbench.bench.driver import run_round
from specbench.engines.fake import FakeBehaviour, FakeEngine, run_virtually
from specbench.errors import InputError
from specbench.metrics import latency, throughput
from specbench.records import Conversation, Message, RoundRecord, SamplingSpec

EXACT = 1e-9


def prompts(count: int, **fields: object) -> list[Conversation]:
    return [Conversation(f"p{i}", turns=("one two three",), **fields) for i in range(count)]  # type: ignore[arg-type]


def serve(
    engine: FakeEngine,
    conversations: Sequence[Conversation],
    *,
    policy: str = "ar",
    max_concurrency: int = 1,
    sampling: SamplingSpec | None = None,
    stop_after_s: float | None = None,
) -> RoundRecord:
    async def main(clock):  # type: ignore[no-untyped-def]
        engine.clock = clock
        stop = asyncio.Event()
        if stop_after_s is not None:
            asyncio.get_running_loop().call_later(stop_after_s, stop.set)
        return await run_round(
            engine,
            policy,
            conversations,
            max_concurrency=max_concurrency,
            sampling=sampling or SamplingSpec(max_tokens=5),
            stop=stop,
            clock=clock,
        )

    return run_virtually(main)


def test_one_token_per_chunk() -> None:
    engine = FakeEngine({"ar": FakeBehaviour(first_token_s=0.5, chunk_s=0.1)})
    record = serve(engine, prompts(1))
    (request,) = record.requests
    assert record.complete
    assert record.failure is None
    assert request.num_prompt_tokens == 5
    assert request.num_output_tokens == 5
    assert request.chunk_tokens == (1, 1, 1, 1, 1)
    assert request.output_token_ids == (5, 6, 7, 8, 9)
    assert request.finish_reason == "length"
    assert request.error is None
    assert latency.ttft_ms(request) == pytest.approx(500, rel=EXACT)
    assert latency.e2el_ms(request) == pytest.approx(900, rel=EXACT)
    assert latency.tpot_ms(request) == pytest.approx(100, rel=EXACT)
    assert latency.itl_per_chunk_ms(request) == pytest.approx([100] * 4, rel=EXACT)
    assert latency.itl_per_token_ms(request) == pytest.approx([100] * 4, rel=EXACT)
    assert throughput.output_throughput(record) == pytest.approx(5 / 0.9, rel=EXACT)
    assert throughput.request_throughput(record) == pytest.approx(1 / 0.9, rel=EXACT)


def test_many_tokens_per_chunk_are_counted_as_tokens_not_chunks() -> None:
    behaviour = FakeBehaviour(chunk_tokens=(1, 3), first_token_s=0.5, chunk_s=0.3)
    record = serve(
        FakeEngine({"dspark": behaviour}),
        prompts(1),
        policy="dspark",
        sampling=SamplingSpec(max_tokens=9),
    )
    (request,) = record.requests
    assert request.chunk_tokens == (1, 3, 3, 2)
    assert request.num_output_tokens == 9
    assert latency.e2el_ms(request) == pytest.approx(1400, rel=EXACT)
    assert latency.tpot_ms(request) == pytest.approx(900 / 8, rel=EXACT)
    assert latency.itl_per_chunk_ms(request) == pytest.approx([300] * 3, rel=EXACT)
    assert latency.itl_per_token_ms(request) == pytest.approx([100] * 6 + [150] * 2, rel=EXACT)
    assert throughput.output_throughput(record) == pytest.approx(9 / 1.4, rel=EXACT)


def test_first_chunk_with_several_tokens() -> None:
    behaviour = FakeBehaviour(chunk_tokens=(4, 1), first_token_s=0.5, chunk_s=0.3)
    (request,) = serve(FakeEngine({"ar": behaviour}), prompts(1)).requests
    assert request.chunk_tokens == (4, 1)
    assert latency.ttft_ms(request) == pytest.approx(500, rel=EXACT)
    assert latency.tpot_ms(request) == pytest.approx(300 / 4, rel=EXACT)
    assert latency.itl_per_token_ms(request) == pytest.approx([300], rel=EXACT)


def test_one_output_token_has_no_time_per_output_token() -> None:
    engine = FakeEngine({"ar": FakeBehaviour(num_output_tokens=1, first_token_s=0.5)})
    (request,) = serve(engine, prompts(1)).requests
    assert request.num_output_tokens == 1
    assert request.finish_reason == "stop"
    assert latency.ttft_ms(request) == pytest.approx(500, rel=EXACT)
    assert latency.e2el_ms(request) == pytest.approx(500, rel=EXACT)
    assert latency.tpot_ms(request) is None
    assert latency.itl_per_token_ms(request) == []


def test_no_output_token_has_no_first_token() -> None:
    engine = FakeEngine({"ar": FakeBehaviour(num_output_tokens=0, first_token_s=0.5)})
    record = serve(engine, prompts(1))
    (request,) = record.requests
    assert request.num_output_tokens == 0
    assert request.chunk_times_s == ()
    assert request.error is None
    assert latency.ttft_ms(request) is None
    assert latency.tpot_ms(request) is None
    assert latency.e2el_ms(request) == pytest.approx(500, rel=EXACT)
    assert throughput.output_throughput(record) == 0
    assert throughput.request_throughput(record) == pytest.approx(2, rel=EXACT)


@pytest.mark.parametrize(
    ("max_concurrency", "duration_s"), [(1, 6.0), (2, 3.0), (4, 2.0), (9, 1.0)]
)
def test_closed_loop_keeps_exactly_that_many_in_flight(
    max_concurrency: int, duration_s: float
) -> None:
    engine = FakeEngine({"ar": FakeBehaviour(first_token_s=0.6, chunk_s=0.1)})
    record = serve(engine, prompts(6), max_concurrency=max_concurrency)
    assert engine.max_running == min(max_concurrency, 6)
    assert record.duration_s == pytest.approx(duration_s, rel=EXACT)
    assert len(record.requests) == 6
    assert all(latency.queue_ms(request) == 0 for request in record.requests)


def test_turns_follow_each_other_with_the_models_own_replies() -> None:
    talk = Conversation("talk", turns=("a b", "c"), history=(Message("system", "be brief"),))
    engine = FakeEngine({"ar": FakeBehaviour(first_token_s=0.5, chunk_s=0.1)})
    record = serve(engine, [talk], max_concurrency=4)
    first, second = record.requests
    assert engine.max_running == 1
    assert (first.turn, second.turn) == (0, 1)
    assert first.num_prompt_tokens == (2 + 2) + (2 + 2)
    # System, question, a reply of five words, question: two template tokens each.
    assert second.num_prompt_tokens == (2 + 2) + (2 + 2) + (5 + 2) + (1 + 2)
    assert second.sent_s == pytest.approx(first.finished_s, rel=EXACT)


def test_raw_text_gets_no_chat_template() -> None:
    (request,) = serve(FakeEngine(), [Conversation("raw", text="a b c d")]).requests
    assert request.num_prompt_tokens == 4


def test_items_own_output_limit_wins_over_the_runs() -> None:
    items = [Conversation("short", turns=("x",), max_tokens=2), Conversation("long", turns=("x",))]
    record = serve(FakeEngine(), items)
    assert [request.num_output_tokens for request in record.requests] == [2, 5]


def test_seeds_depend_on_the_workload_alone() -> None:
    items = [Conversation("a", turns=("x", "y")), *prompts(3)]
    sampling = SamplingSpec(max_tokens=2, seed=100)
    seeds = []
    for policy, concurrency in (("ar", 1), ("ngram", 3)):
        engine = FakeEngine()
        serve(engine, items, policy=policy, max_concurrency=concurrency, sampling=sampling)
        seeds.append({r.request_id.partition("/")[2]: r.sampling.seed for r in engine.requests})
    assert seeds[0] == seeds[1]
    assert sorted(seeds[0].values()) == [100, 101, 102, 103, 104]
    assert seeds[0]["r0/a/1"] == 101


def test_failed_request_is_recorded_and_the_others_go_on() -> None:
    items = [Conversation("bad", turns=("x", "y", "z")), *prompts(2)]
    engine = FakeEngine({"ar": FakeBehaviour(first_token_s=0.5)}, refuse=("bad/1",))
    record = serve(engine, items)
    by_id = {(r.item_id, r.turn): r for r in record.requests}
    assert record.complete
    assert len(by_id) == 5
    assert by_id["bad", 0].error is None
    assert by_id["bad", 1].error == "request ar/r0/bad/1 was refused"
    assert by_id["bad", 2].error == "not sent: turn 1 failed"
    assert by_id["p1", 0].error is None
    assert [throughput.failed(r) for r in record.requests].count(True) == 2
    assert throughput.num_output_tokens(record) == 15


def test_unexpected_error_is_recorded_with_its_type() -> None:
    def explode(request: object) -> None:
        raise RuntimeError("no such thing")

    (request,) = serve(FakeEngine(on_request=explode), prompts(1)).requests
    assert request.error == "RuntimeError: no such thing"


def test_stop_aborts_what_is_in_flight_and_keeps_what_is_finished() -> None:
    engine = FakeEngine({"ar": FakeBehaviour(first_token_s=0.5, chunk_s=0.1)})
    # 0.9 s a request, two at a time: at 1.65 s one pair is done, the other has 3 tokens.
    record = serve(engine, prompts(6), max_concurrency=2, stop_after_s=1.65)
    assert not record.complete
    assert record.failure is None
    assert [r.error is None for r in record.requests] == [True, True, False, False]
    cut = record.requests[2:]
    assert [r.finish_reason for r in cut] == ["abort", "abort"]
    assert [r.num_output_tokens for r in cut] == [3, 3]
    assert not any(throughput.failed(r) for r in cut)
    assert engine.num_running == 0
    assert engine.num_aborted == 2
    assert record.duration_s == pytest.approx(1.65, rel=EXACT)
    assert throughput.output_throughput(record) == pytest.approx(16 / 1.65, rel=EXACT)


def test_dead_engine_ends_the_round_and_keeps_what_is_finished() -> None:
    record = serve(FakeEngine(die_after_requests=3), prompts(6))
    assert not record.complete
    assert record.failure == "the engine died (log: fake.log)"
    assert [r.error for r in record.requests] == [None, None, None, record.failure]


def test_engine_that_is_dead_before_the_round_leaves_an_empty_one() -> None:
    engine = FakeEngine()
    engine.dead = True
    record = serve(engine, prompts(2))
    assert record.failure is not None
    assert record.requests == ()
    assert throughput.output_throughput(record) is None


def test_prompt_that_does_not_fit_is_refused_before_anything_is_sent() -> None:
    items = [*prompts(2), Conversation("huge", turns=("w " * 30, "v " * 10), max_tokens=4)]
    engine = FakeEngine(max_model_len=50)
    # Three messages with two template tokens each, 40 words, two replies of 4 tokens.
    with pytest.raises(InputError, match=r"'huge'.*50 tokens: 46 prompt.*8 output.*2 turn"):
        serve(engine, items)
    assert engine.requests == []
    assert engine.policies_set == []


def test_prompt_that_just_fits_is_served() -> None:
    engine = FakeEngine(max_model_len=10)
    assert serve(engine, prompts(1)).requests[0].error is None
    with pytest.raises(InputError):
        serve(engine, prompts(1, max_tokens=6))


def test_steps_of_earlier_work_are_not_the_rounds() -> None:
    engine = FakeEngine({"ar": FakeBehaviour(chunk_tokens=(1, 2), num_verified_tokens=3)})
    first = serve(engine, prompts(2))
    engine._steps.append(first.steps[0])
    second = serve(engine, prompts(2))
    assert len(first.steps) == len(second.steps) == 6
    assert sum(step.num_emitted_tokens for step in second.steps) == 10
    assert [step.accepted_per_request for step in second.steps[:3]] == [(), (1,), (1,)]
