"""Definitions held against vLLM's own code on the same numbers."""

from __future__ import annotations

import random

import pytest

from specbench.metrics import acceptance, latency, throughput
from specbench.metrics.distribution import summarize
from specbench.records import RequestRecord, RoundRecord, StepRecord

serve = pytest.importorskip("vllm.benchmarks.serve", reason="needs one of the vLLM builds")


def random_requests(count: int, rng: random.Random) -> list[RequestRecord]:
    requests = []
    for index in range(count):
        sent = rng.uniform(0, 5)
        times, tokens, now = [], [], sent
        for _ in range(rng.randint(1, 12)):
            now += rng.uniform(0.01, 0.2)
            times.append(now)
            tokens.append(rng.randint(1, 5))
        requests.append(
            RequestRecord(
                request_id=str(index),
                item_id=str(index),
                turn=0,
                policy="ar",
                round_index=0,
                warmup=False,
                num_prompt_tokens=rng.randint(1, 100),
                intended_s=sent,
                sent_s=sent,
                finished_s=now,
                chunk_times_s=tuple(times),
                chunk_tokens=tuple(tokens),
                output_token_ids=tuple(range(sum(tokens))),
                finish_reason="stop",
                error="refused" if index % 7 == 3 else None,
            )
        )
    return requests


def as_vllm_output(request: RequestRecord) -> object:
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput

    return RequestFuncOutput(
        success=request.error is None,
        latency=request.finished_s - request.sent_s,
        output_tokens=request.num_output_tokens,
        ttft=request.chunk_times_s[0] - request.sent_s,
        itl=[gap / 1e3 for gap in latency.itl_per_chunk_ms(request)],
        prompt_len=request.num_prompt_tokens,
        start_time=request.sent_s,
    )


def test_latencies_and_throughput_equal_vllms_benchmark() -> None:
    requests = random_requests(50, random.Random(3))
    duration_s = 7.5
    expected, _ = serve.calculate_metrics(
        input_requests=[],
        outputs=[as_vllm_output(request) for request in requests],
        dur_s=duration_s,
        tokenizer=None,
        selected_percentiles=[90.0, 99.0],
        goodput_config_dict={},
    )
    record = RoundRecord("ar", 0, False, 0.0, duration_s, tuple(requests), ())
    assert throughput.output_throughput(record) == pytest.approx(expected.output_throughput)
    assert throughput.request_throughput(record) == pytest.approx(expected.request_throughput)
    done = [request for request in requests if throughput.succeeded(request)]
    samples = {
        "ttft": [latency.ttft_ms(r) for r in done],
        "tpot": [latency.tpot_ms(r) for r in done if r.num_output_tokens > 1],
        "e2el": [latency.e2el_ms(r) for r in done],
        "itl": [gap for r in done for gap in latency.itl_per_chunk_ms(r)],
    }
    for name, values in samples.items():
        summary = summarize(values)  # type: ignore[arg-type]
        assert summary is not None
        assert summary.mean == pytest.approx(getattr(expected, f"mean_{name}_ms"))
        assert summary.median == pytest.approx(getattr(expected, f"median_{name}_ms"))
        percentiles = dict(getattr(expected, f"percentiles_{name}_ms"))
        assert (summary.p90, summary.p99) == pytest.approx((percentiles[90.0], percentiles[99.0]))


def test_acceptance_equals_vllms_statistics() -> None:
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    rng = random.Random(5)
    stats = SpecDecodingStats.new(7)
    steps = []
    for _ in range(200):
        verified = [rng.randint(0, 7) for _ in range(rng.randint(1, 6))]
        accepted = [rng.randint(0, length) for length in verified]
        drafts = [(a, v) for a, v in zip(accepted, verified, strict=True) if v]
        for kept, length in drafts:
            stats.observe_draft(length, kept)
        steps.append(
            StepRecord(
                num_requests=len(verified),
                num_decoding=len(verified),
                num_prompt_tokens=0,
                num_verified_tokens=sum(verified),
                num_accepted_tokens=sum(accepted),
                num_emitted_tokens=sum(accepted) + len(verified),
                num_drafted_tokens=7 * len(verified),
                num_requests_verified=len(drafts),
                step_ms=10.0,
                verify_ms=8.0,
                draft_ms=1.0,
                decide_ms=0.0,
                context_tokens=10.0,
                accepted_per_request=tuple(a for a, _ in drafts),
                verified_per_request=tuple(v for _, v in drafts),
            )
        )
    assert acceptance.num_drafts(steps) == stats.num_drafts
    assert acceptance.verified_tokens(steps) == stats.num_draft_tokens
    length = acceptance.acceptance_length(steps)
    assert length == pytest.approx(1 + stats.num_accepted_tokens / stats.num_drafts)
    by_position = [n / stats.num_drafts for n in stats.num_accepted_tokens_per_pos]
    assert acceptance.acceptance_by_position(steps) == pytest.approx(by_position)
