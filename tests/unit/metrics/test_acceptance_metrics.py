from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specbench.metrics import acceptance, step_time
from specbench.records import StepRecord

MakeStep = Callable[..., StepRecord]

drafts = st.integers(1, 8).flatmap(lambda v: st.tuples(st.integers(0, v), st.just(v)))


def test_by_hand(make_step: MakeStep) -> None:
    steps = [
        make_step((2, 0), (3, 3), num_undrafted=1),
        make_step((1,), (1,), num_undrafted=2),
        make_step(num_undrafted=2),
    ]
    assert acceptance.num_drafts(steps) == 3
    assert acceptance.num_request_steps(steps) == 8
    assert acceptance.verified_tokens(steps) == 7
    assert acceptance.accepted_tokens(steps) == 3
    assert acceptance.acceptance_length(steps) == pytest.approx(2.0)
    assert acceptance.acceptance_length_per_step(steps) == pytest.approx(11 / 8)
    assert acceptance.mean_verified(steps) == pytest.approx(7 / 8)
    assert acceptance.acceptance_rate_of_verified(steps) == pytest.approx(3 / 7)
    assert acceptance.acceptance_rate_of_drafted(steps) == pytest.approx(3 / 7)
    assert acceptance.acceptance_by_position(steps) == pytest.approx([2 / 3, 1 / 3, 0])
    assert acceptance.conditional_acceptance_by_position(steps) == pytest.approx([2 / 3, 1, 0])


def test_position_nobody_reached_is_undefined(make_step: MakeStep) -> None:
    rates = acceptance.conditional_acceptance_by_position([make_step((0,), (2,))])
    assert rates == [0.0, None]


def test_adaptive_verification_separates_the_two_rates(make_step: MakeStep) -> None:
    steps = [make_step((2,), (2,), num_drafted_tokens=7)]
    assert acceptance.acceptance_rate_of_verified(steps) == 1
    assert acceptance.acceptance_rate_of_drafted(steps) == pytest.approx(2 / 7)


def test_undefined_without_drafts_or_steps(make_step: MakeStep) -> None:
    plain = [make_step(num_undrafted=4)]
    assert acceptance.acceptance_length(plain) is None
    assert acceptance.acceptance_length_per_step(plain) == 1
    assert acceptance.acceptance_rate_of_verified(plain) is None
    assert acceptance.acceptance_rate_of_drafted(plain) is None
    assert acceptance.acceptance_by_position(plain) == []
    assert acceptance.conditional_acceptance_by_position(plain) == []
    assert acceptance.acceptance_length_per_step([]) is None
    assert acceptance.mean_verified([]) is None
    assert step_time.mean_step_ms([]) is None
    assert step_time.step_shares([]) is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(drafts, min_size=1, max_size=5), min_size=1, max_size=10))
def test_length_is_one_plus_the_sum_over_positions(
    make_step: MakeStep, batches: list[list[tuple[int, int]]]
) -> None:
    steps = [make_step(*zip(*batch, strict=True)) for batch in batches]
    by_position = acceptance.acceptance_by_position(steps)
    assert acceptance.acceptance_length(steps) == pytest.approx(1 + sum(by_position))
    assert all(a >= b for a, b in pairwise(by_position))
    conditional = acceptance.conditional_acceptance_by_position(steps)
    assert len(conditional) == len(by_position)
    assert all(rate is None or 0 <= rate <= 1 for rate in conditional)
    # Without undrafted requests both lengths rest on the same request-steps.
    assert acceptance.acceptance_length_per_step(steps) == pytest.approx(1 + sum(by_position))


def test_shares_leave_out_steps_of_unknown_length(make_step: MakeStep) -> None:
    steps = [
        make_step(),
        make_step(step_ms=20.0, draft_ms=4.0, verify_ms=12.0, decide_ms=0.5),
        make_step(step_ms=None, draft_ms=100.0),
    ]
    shares = step_time.step_shares(steps)
    assert shares is not None
    assert shares.draft == pytest.approx(6 / 30)
    assert shares.verify == pytest.approx(18 / 30)
    assert shares.decide == pytest.approx(1.5 / 30)
    assert shares.other == pytest.approx(4.5 / 30)
    assert step_time.mean_step_ms(steps) == pytest.approx(15)


def test_what_was_drafted_for_nothing(make_step: MakeStep) -> None:
    steps = [
        make_step((2, 0), (2, 1), num_drafted_tokens=14),
        make_step((0,), (0,), num_drafted_tokens=0),
        make_step(num_undrafted=3, num_drafted_tokens=0),
        make_step(num_drafted_tokens=0),  # a chunk of a prompt: nothing could be drafted
    ]
    assert acceptance.unverified_tokens(steps) == 11
    assert acceptance.undrafted_share(steps) == pytest.approx(2 / 3)
    assert acceptance.undrafted_share([]) is None
