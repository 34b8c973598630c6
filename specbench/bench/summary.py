"""From round records to one policy's entry in the result document."""

from __future__ import annotations

from collections.abc import Sequence

from specbench.metrics import acceptance, latency, step_time, throughput
from specbench.metrics.distribution import summarize
from specbench.metrics.repetition import pooled_cycle_share
from specbench.records import RequestRecord, RoundRecord, StepRecord
from specbench.results.document import (
    Acceptance,
    DistributionMs,
    Latencies,
    PolicyResult,
    Ratio,
    RoundResult,
    StepTime,
)
from specbench.stats import paired_ratio

RATIO_OF_BASELINE = Ratio(value=1.0, ci95=None)


def measured_rounds(rounds: Sequence[RoundRecord], label: str) -> list[RoundRecord]:
    """The rounds a policy's figures rest on, in order, without warm-ups.

    Complete rounds only; if the run was cut before one was complete, what there is of
    the first.
    """
    own = [r for r in rounds if r.policy == label and not r.warmup and r.requests]
    return [r for r in own if r.complete] or own


def summarize_policy(
    policy: str,
    label: str,
    rounds: Sequence[RoundRecord],
    baseline: str,
) -> PolicyResult:
    """All metrics of one policy, see docs/metrics.md.

    Args:
        policy: name as the engine knows it.
        label: name within the comparison.
        rounds: every round of the run, all policies.
        baseline: label that ratios refer to.
    """
    own = measured_rounds(rounds, label)
    requests = [request for record in own for request in record.requests]
    steps = [step for record in own for step in record.steps]
    return PolicyResult(
        policy=policy,
        num_rounds=len(own),
        num_requests=len(requests),
        num_failed=sum(throughput.failed(r) for r in requests),
        num_aborted=sum(throughput.aborted(r) for r in requests),
        prompt_tokens=sum(r.num_prompt_tokens for r in requests if not throughput.failed(r)),
        output_tokens=sum(throughput.num_output_tokens(record) for record in own),
        output_throughput=_pooled_rate(own, [throughput.output_throughput(r) for r in own]),
        request_throughput=_pooled_rate(own, [throughput.request_throughput(r) for r in own]),
        ratio_to_baseline=throughput_ratio(rounds, label, baseline),
        **_latencies([r for r in requests if throughput.succeeded(r)]),
        **_acceptance(steps),
        **_shares(steps),
        cycle_share=cycle_share(requests),
        rounds=[_round_result(r, rounds, baseline) for r in _all_rounds(rounds, label)],
    )


def throughput_ratio(rounds: Sequence[RoundRecord], label: str, baseline: str) -> Ratio:
    """Output throughput of ``label`` over ``baseline``'s, paired by complete round."""
    if label == baseline:
        return RATIO_OF_BASELINE
    own, base = _throughput_by_round(rounds, label), _throughput_by_round(rounds, baseline)
    shared = sorted(own.keys() & base.keys())
    estimate = paired_ratio([own[r] for r in shared], [base[r] for r in shared])
    if estimate is None:
        return Ratio(value=None, ci95=None)
    return Ratio(value=estimate.value, ci95=list(estimate.ci95) if estimate.ci95 else None)


def cycle_share(requests: Sequence[RequestRecord]) -> float | None:
    """Share of delivered tokens that repeat a cycle; None if nothing was delivered."""
    outputs = [
        list(r.output_token_ids)
        for r in requests
        if not throughput.failed(r) and r.output_token_ids
    ]
    return float(pooled_cycle_share(outputs)) if outputs else None


def _all_rounds(rounds: Sequence[RoundRecord], label: str) -> list[RoundRecord]:
    return [r for r in rounds if r.policy == label and not r.warmup]


def _throughput_by_round(rounds: Sequence[RoundRecord], label: str) -> dict[int, float]:
    rates = {
        r.round_index: throughput.output_throughput(r)
        for r in _all_rounds(rounds, label)
        if r.complete
    }
    return {index: rate for index, rate in rates.items() if rate}


def _pooled_rate(rounds: Sequence[RoundRecord], rates: Sequence[float | None]) -> float | None:
    """Total over total: the rounds' rates weighted by their durations."""
    pairs = [(r.duration_s, x) for r, x in zip(rounds, rates, strict=True) if x is not None]
    total_s = sum(duration for duration, _ in pairs)
    return sum(duration * rate for duration, rate in pairs) / total_s if total_s else None


def _distribution(values: Sequence[float | None]) -> DistributionMs | None:
    summary = summarize([value for value in values if value is not None])
    if summary is None:
        return None
    return DistributionMs(
        mean=summary.mean, median=summary.median, p90=summary.p90, p99=summary.p99
    )


def _latencies(requests: Sequence[RequestRecord]) -> Latencies:
    return Latencies(
        ttft_ms=_distribution([latency.ttft_ms(r) for r in requests]),
        tpot_ms=_distribution([latency.tpot_ms(r) for r in requests]),
        e2el_ms=_distribution([latency.e2el_ms(r) for r in requests]),
        queue_ms=_distribution([latency.queue_ms(r) for r in requests]),
        itl_ms=_distribution([gap for r in requests for gap in latency.itl_per_token_ms(r)]),
        itl_per_chunk_ms=_distribution(
            [gap for r in requests for gap in latency.itl_per_chunk_ms(r)]
        ),
    )


def _acceptance(steps: Sequence[StepRecord]) -> Acceptance:
    return Acceptance(
        acceptance_length=acceptance.acceptance_length(steps),
        acceptance_length_per_step=acceptance.acceptance_length_per_step(steps),
        acceptance_by_position=acceptance.acceptance_by_position(steps),
        conditional_acceptance_by_position=acceptance.conditional_acceptance_by_position(steps),
        acceptance_rate_of_verified=acceptance.acceptance_rate_of_verified(steps),
        acceptance_rate_of_drafted=acceptance.acceptance_rate_of_drafted(steps),
        drafted_tokens=acceptance.drafted_tokens(steps),
        verified_tokens=acceptance.verified_tokens(steps),
        accepted_tokens=acceptance.accepted_tokens(steps),
        unverified_tokens=acceptance.unverified_tokens(steps),
        undrafted_share=acceptance.undrafted_share(steps),
        mean_verified=acceptance.mean_verified(steps),
    )


def _shares(steps: Sequence[StepRecord]) -> StepTime:
    shares = step_time.step_shares(steps)
    return StepTime(
        num_steps=len(steps),
        mean_step_ms=step_time.mean_step_ms(steps),
        draft_share=shares.draft if shares else None,
        verify_share=shares.verify if shares else None,
        decide_share=shares.decide if shares else None,
        other_share=shares.other if shares else None,
    )


def _round_result(record: RoundRecord, rounds: Sequence[RoundRecord], baseline: str) -> RoundResult:
    rate = throughput.output_throughput(record)
    base = _throughput_by_round(rounds, baseline).get(record.round_index)
    comparable = record.complete and rate is not None and base is not None
    return RoundResult(
        round=record.round_index,
        complete=record.complete,
        duration_s=record.duration_s,
        num_requests=len(record.requests),
        num_failed=sum(throughput.failed(r) for r in record.requests),
        output_tokens=throughput.num_output_tokens(record),
        output_throughput=rate,
        ratio_to_baseline=rate / base if comparable and rate and base else None,
        acceptance_length=acceptance.acceptance_length(record.steps),
        mean_step_ms=step_time.mean_step_ms(record.steps),
    )
