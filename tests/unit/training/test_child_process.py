"""Steps in a process of their own: results, progress, errors and death come back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from specbench.errors import EngineFailure, InputError
from specbench.training.child_process import call_in_child

OnProgress = Callable[[float, float], None]


def add(left: int, right: int, on_progress: OnProgress) -> tuple[int, int]:
    on_progress(1.0, 1.0)
    return left + right, os.getpid()


def refuse(on_progress: OnProgress) -> None:
    raise InputError("a.jsonl, line 3: not JSON")


def stumble(on_progress: OnProgress) -> None:
    raise ZeroDivisionError("division by zero\nand more")


def die(on_progress: OnProgress) -> None:
    os._exit(9)


def work_until_stopped(path: Path, on_progress: OnProgress) -> None:
    try:
        while True:
            on_progress(1.0, 1.0)
            time.sleep(0.01)
    finally:
        path.write_text("saved")


def ignore(done: float, total: float) -> None:
    """No progress wanted."""


def test_result_and_progress_come_back_from_another_process() -> None:
    seen: list[tuple[float, float]] = []
    total, process = call_in_child(
        add, {"left": 2, "right": 3}, lambda done, wanted: seen.append((done, wanted))
    )
    assert total == 5
    assert process != os.getpid()
    assert seen == [(1.0, 1.0)]


def test_an_expected_error_stays_what_it_is() -> None:
    with pytest.raises(InputError, match="line 3: not JSON"):
        call_in_child(refuse, {}, ignore)


def test_an_unforeseen_error_is_one_line() -> None:
    with pytest.raises(EngineFailure, match=r"^ZeroDivisionError: division by zero$"):
        call_in_child(stumble, {}, ignore)


def test_death_is_noticed() -> None:
    with pytest.raises(EngineFailure, match="exit code 9"):
        call_in_child(die, {}, ignore)


def test_an_interruption_waits_until_the_child_has_saved(tmp_path: Path) -> None:
    def press(done: float, total: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call_in_child(work_until_stopped, {"path": tmp_path / "state"}, press)
    assert (tmp_path / "state").read_text() == "saved"
