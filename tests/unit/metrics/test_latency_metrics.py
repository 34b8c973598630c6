from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specbench.metrics import latency, throughput
from specbench.metrics.distribution import summarize
from specbench.records import RequestRecord, RoundRecord

MakeRequest = Callable[..., RequestRecord]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.floats(0.001, 1.0), st.integers(1, 8)), min_size=1, max_size=20),
)
def test_gaps_add_up(make_request: MakeRequest, chunks: list[tuple[float, int]]) -> None:
    times, now = [], 0.0
    for gap, _ in chunks:
        now += gap
        times.append(now)
    request = make_request(tuple(times), tuple(size for _, size in chunks))
    first = latency.ttft_ms(request)
    assert first is not None
    decode_ms = latency.e2el_ms(request) - first
    per_chunk, per_token = latency.itl_per_chunk_ms(request), latency.itl_per_token_ms(request)
    assert sum(per_chunk) == pytest.approx(decode_ms, abs=1e-6)
    assert sum(per_token) == pytest.approx(decode_ms, abs=1e-6)
    assert len(per_chunk) == len(chunks) - 1
    assert len(per_token) == request.num_output_tokens - chunks[0][1]
    tpot = latency.tpot_ms(request)
    if request.num_output_tokens > 1:
        assert tpot == pytest.approx(decode_ms / (request.num_output_tokens - 1), abs=1e-6)
    else:
        assert tpot is None


def test_waiting_in_the_client_is_not_latency(make_request: MakeRequest) -> None:
    request = make_request((3.0,), (1,), intended_s=0.5, sent_s=2.0)
    assert latency.e2el_ms(request) == pytest.approx(1000)
    assert latency.ttft_ms(request) == pytest.approx(1000)
    assert latency.queue_ms(request) == pytest.approx(1500)


def test_summary_by_hand() -> None:
    summary = summarize([float(value) for value in range(1, 102)])
    assert summary is not None
    assert (summary.mean, summary.median, summary.p90, summary.p99) == (51, 51, 91, 100)
    assert summarize([]) is None


def test_only_what_was_delivered_counts(make_request: MakeRequest) -> None:
    requests = (
        make_request((1.0, 2.0), (1, 3)),
        make_request((1.0,), (2,), error="refused"),
        make_request((1.0,), (5,), error="aborted: stopped", finish_reason="abort"),
    )
    record = RoundRecord("ar", 0, False, 0.0, 2.0, requests, ())
    assert throughput.num_output_tokens(record) == 9
    assert throughput.output_throughput(record) == pytest.approx(4.5)
    assert throughput.request_throughput(record) == pytest.approx(0.5)


def test_rates_are_undefined_not_zero(make_request: MakeRequest) -> None:
    refused = make_request((), (), error="refused")
    record = RoundRecord("ar", 0, False, 0.0, 2.0, (refused,), ())
    assert throughput.output_throughput(record) is None
    assert throughput.request_throughput(record) is None
    instant = RoundRecord("ar", 0, False, 1.0, 1.0, (make_request((1.0,), (1,)),), ())
    assert throughput.output_throughput(instant) is None
    assert throughput.request_throughput(instant) is None
