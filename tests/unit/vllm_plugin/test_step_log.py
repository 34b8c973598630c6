"""Durations and counts of the step log, on marks given by hand."""

from __future__ import annotations

import torch

from specbench.vllm_plugin.step_log import StepLog


class ScriptedClock:
    """Marks are the numbers given; differences are milliseconds."""

    def __init__(self, marks):
        self.marks = iter(marks)

    def mark(self):
        return next(self.marks)

    def elapsed_ms(self, start, end):
        return float(end - start)


def finish(step, sampled, rejected):
    step.num_sampled = torch.tensor(sampled)
    step.num_rejected = torch.tensor(rejected)


def test_a_step_lasts_until_the_next_one_starts():
    log = StepLog(ScriptedClock([10, 25]))
    finish(log.begin(["a"], set()), [1], [0])
    finish(log.begin(["a"], set()), [1], [0])
    first, second = log.take(include_open=True)
    assert first["step_ms"] == 15
    assert second["step_ms"] is None


def test_idle_time_is_nobodys_duration():
    log = StepLog(ScriptedClock([10, 500]))
    finish(log.begin(["a", "b"], set()), [1, 1], [0, 0])
    finish(log.begin(["c"], {"a", "b"}), [1], [0])
    assert log.take(include_open=True)[0]["step_ms"] is None


def test_a_pause_ends_the_last_step_without_a_duration():
    log = StepLog(ScriptedClock([10, 500]))
    finish(log.begin(["a"], set()), [1], [0])
    log.pause()
    finish(log.begin(["b"], set()), [1], [0])
    assert [step["step_ms"] for step in log.take(include_open=True)] == [None, None]


def test_an_open_step_stays_for_the_next_call():
    log = StepLog(ScriptedClock([0, 7]))
    finish(log.begin(["a"], set()), [1], [0])
    assert log.take(include_open=False) == []
    finish(log.begin(["a"], set()), [1], [0])
    assert [step["step_ms"] for step in log.take(include_open=False)] == [7]


def test_what_was_drafted_is_told_per_request_with_its_survivals():
    log = StepLog(ScriptedClock([0, 1, 2]))
    for lengths in ([0, 0], [1, 2]):
        step = log.begin(["a", "b"], set())
        finish(step, [1, 1], [0, 0])
        step.draft_lengths = torch.tensor(lengths)
        step.predicted_survival = torch.tensor([[0.5, 0.25], [0.75, 0.5]])
        step.shown_survival = torch.tensor([[0.25, 0.0], [1.0, 0.5]])
    skipped, drafted = log.take(include_open=True)
    assert skipped["num_drafted_tokens"] == 0
    assert skipped["drafted_per_request"] == skipped["shown_survival"] == []
    assert skipped["predicted_survival"] == [[0.5, 0.25], [0.75, 0.5]]
    assert drafted["num_drafted_tokens"] == 3
    assert drafted["drafted_per_request"] == [1, 2]
    assert drafted["shown_survival"] == [[0.25, 0.0], [1.0, 0.5]]


def test_counts_follow_from_sampled_and_rejected():
    log = StepLog(ScriptedClock([0]))
    # In its prompt; decoding without drafts; 3 drafts, 2 kept; 2 drafts, none kept.
    step = log.begin(["a", "b", "c", "d"], set())
    finish(step, [0, 1, 3, 1], [0, 0, 1, 2])
    step.draft_lengths = torch.tensor([0, 7, 7, 0])
    (record,) = log.take(include_open=True)
    assert record["num_decoding"] == 3
    assert record["num_verified_tokens"] == 5
    assert record["num_accepted_tokens"] == 2
    assert record["num_emitted_tokens"] == 5
    assert record["num_requests_verified"] == 2
    assert record["accepted_per_request"] == [2, 0]
    assert record["verified_per_request"] == [3, 2]
    assert record["num_drafted_tokens"] == 14


def test_a_step_that_never_sampled_is_not_reported():
    log = StepLog(ScriptedClock([0, 3]))
    log.begin(["a"], set())
    finish(log.begin(["a"], set()), [1], [0])
    assert len(log.take(include_open=True)) == 1
