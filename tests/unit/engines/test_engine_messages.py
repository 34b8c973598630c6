"""What a failed engine start tells the user."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from pydantic import BaseModel, field_validator

from specbench.engines.engine_log import last_error_line, log_size, output_to_file
from specbench.engines.vllm import first_reason
from specbench.errors import EnvironmentProblem

LOG = """\
(Worker pid=1) ERROR 11-29 20:54:51 [multiproc_executor.py:1063] ValueError: Too many tokens: 3800.
(EngineCore pid=2) ERROR 11-29 20:54:52 [core.py:1512] Exception: WorkerProc initialization failed
RuntimeError: Engine core initialization failed. See root cause above.
INFO all done
"""


def test_the_first_hand_cause_is_named(tmp_path):
    log = tmp_path / "engine.log"
    log.write_text(LOG)
    assert last_error_line(log) == "ValueError: Too many tokens: 3800."


def test_a_second_hand_cause_is_better_than_none(tmp_path):
    log = tmp_path / "engine.log"
    log.write_text("RuntimeError: Engine core initialization failed.\n")
    assert last_error_line(log) == "RuntimeError: Engine core initialization failed."


def test_a_quiet_or_missing_log_names_nothing(tmp_path):
    (tmp_path / "engine.log").write_text("INFO fine\n")
    assert last_error_line(tmp_path / "engine.log") is None
    assert last_error_line(tmp_path / "missing.log") is None


class Model(BaseModel):
    size: int

    @field_validator("size")
    @classmethod
    def divides(cls, size: int) -> int:
        if size % 2:
            raise ValueError("9 heads, 2 ranks.")
        return size


@pytest.mark.parametrize(("size", "reason"), [(9, "size: 9 heads"), ("x", "size: Input should be")])
def test_reason_inside_a_validation_error(size, reason):
    with pytest.raises(ValueError, match="validation error") as caught:
        Model(size=size)
    assert first_reason(caught.value).startswith(reason)


def test_only_this_runs_part_of_the_log_counts(tmp_path):
    log = tmp_path / "engine.log"
    log.write_text("ValueError: of the last run\n")
    start = log_size(log)
    assert last_error_line(log, start=start) is None
    with log.open("a") as file:
        file.write("KeyError: of this run\n")
    assert last_error_line(log, start=start) == "KeyError: of this run"
    assert log_size(tmp_path / "missing") == 0


def test_reason_of_other_errors():
    assert first_reason(ValueError("plain\nmore")) == "plain"
    assert first_reason(ValueError()) == "ValueError"


def test_children_keep_the_file_and_the_process_gets_its_terminal_back(tmp_path):
    log = tmp_path / "deep" / "engine.log"
    code = (
        "import os, subprocess, sys\n"
        "from pathlib import Path\n"
        "from specbench.engines.engine_log import output_to_file\n"
        "with output_to_file(Path(sys.argv[1]), verbose=False):\n"
        "    print('inside')\n"
        "    child = subprocess.Popen(['sh', '-c', 'sleep 0.3; echo child'])\n"
        "print('outside')\n"
        "child.wait()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(log)], capture_output=True, text=True, check=True
    )
    assert result.stdout == "outside\n"
    assert sorted(log.read_text().split()) == ["child", "inside"]


def test_an_unwritable_log_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(EnvironmentProblem, match="--log-file"),
        output_to_file(tmp_path / "file" / "engine.log", verbose=False),
    ):
        os._exit(99)
