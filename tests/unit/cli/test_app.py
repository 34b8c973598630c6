"""The main command: help without heavy imports, one line and an exit code for every failure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specbench import __version__
from specbench.cli import app as app_module
from specbench.cli import failures
from specbench.cli.app import COMMANDS, LazyCommand, main
from specbench.errors import (
    EngineFailure,
    EnvironmentProblem,
    InputError,
    Interrupted,
    SpecbenchError,
    UsageError,
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(failures.DEBUG_ENV, raising=False)


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run ``specbench ARGUMENTS`` in this process; returns the exit code."""
    monkeypatch.setattr(sys, "argv", ["specbench", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    code = stop.value.code
    assert isinstance(code, int)
    return code


def register(monkeypatch: pytest.MonkeyPatch, error: BaseException | None) -> None:
    """Make ``specbench fail`` a command that raises ``error``."""

    def fail() -> None:
        if error is not None:
            raise error

    monkeypatch.setitem(COMMANDS, "fail", LazyCommand(f"{__name__}:_fail", "Fail."))
    monkeypatch.setitem(globals(), "_fail", fail)


def python(code: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, **options
    )


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["costs", "--help"]])
def test_help_imports_neither_torch_nor_vllm(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from specbench.cli.app import main\n"
        f"sys.argv = ['specbench', *{arguments!r}]\n"
        "try: main()\n"
        "except SystemExit as stop: print(stop.code, file=sys.stderr)\n"
        "heavy = {'torch', 'vllm', 'transformers', 'numba', 'triton'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr)\n"
    )
    result = python(code)
    assert result.stderr.splitlines() == ["0", "[]"]
    assert result.stdout.strip()


def test_help_lists_every_command_with_its_text(monkeypatch, capsys) -> None:
    assert run_main(monkeypatch, "--help") == 0
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for name, command in COMMANDS.items():
        assert f"{name} {command.help}" in words


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_loads_and_has_help(name: str, monkeypatch, capsys) -> None:
    assert run_main(monkeypatch, name, "--help") == 0
    assert f"Usage: specbench {name}" in capsys.readouterr().out


def test_version(monkeypatch, capsys) -> None:
    assert run_main(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"specbench {__version__}\n"


@pytest.mark.parametrize(("typo", "meant"), [("comapre", "compare"), ("docter", "doctor")])
def test_unknown_command_names_the_nearest(typo: str, meant: str, monkeypatch, capsys) -> None:
    assert run_main(monkeypatch, typo) == 2
    assert f"Did you mean '{meant}'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("doctor", "--no-such-option"), ("--nope",), ("zzz",)])
def test_wrong_usage_exits_2(arguments: tuple[str, ...], monkeypatch, capsys) -> None:
    assert run_main(monkeypatch, *arguments) == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (SpecbenchError("base"), 1, "error: base"),
        (UsageError("no policy 'x'"), 2, "error: no policy 'x'"),
        (InputError("a.jsonl, line 3: not JSON"), 2, "error: a.jsonl, line 3: not JSON"),
        (EnvironmentProblem("vLLM is not installed"), 3, "error: vLLM is not installed"),
        (EngineFailure("died\nsee log"), 4, "error: died see log"),
        (Interrupted("2 of 5 rounds kept"), 130, "interrupted: 2 of 5 rounds kept"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (EnvironmentProblem("x " * 200), 3, "error: " + ("x " * 200).strip()),
    ],
)
def test_failures_are_one_line(error, code: int, line: str, monkeypatch, capsys) -> None:
    register(monkeypatch, error)
    assert run_main(monkeypatch, "fail") == code
    captured = capsys.readouterr()
    assert captured.err == line + "\n"
    assert captured.out == ""


def test_success_exits_0(monkeypatch, capsys) -> None:
    register(monkeypatch, None)
    assert run_main(monkeypatch, "fail") == 0
    assert capsys.readouterr().err == ""


def test_messages_are_not_markup(monkeypatch, capsys) -> None:
    register(monkeypatch, InputError("bad [red]value[/] in [cpu]"))
    assert run_main(monkeypatch, "fail") == 2
    assert capsys.readouterr().err == "error: bad [red]value[/] in [cpu]\n"


def test_unexpected_failure_names_exception_and_log(tmp_path, monkeypatch, capsys) -> None:
    register(monkeypatch, ZeroDivisionError("division by zero"))
    assert run_main(monkeypatch, "fail") == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("error: unexpected ZeroDivisionError: division by zero")
    [log] = (tmp_path / "cache" / "logs").iterdir()
    assert str(log) in error
    assert "Traceback (most recent call last)" in log.read_text()


def test_crash_log_leaves_option_values_out(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["specbench", "run", "--engine-arg=hf_token=s3cret", "s3cret"])
    failures.report_failure(ValueError("x"))
    [log] = (tmp_path / "cache" / "logs").iterdir()
    assert "--engine-arg" in log.read_text()
    assert "s3cret" not in log.read_text()


def test_crash_log_falls_back_to_the_temporary_directory(tmp_path, monkeypatch, capsys) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("SPECBENCH_CACHE", str(blocked))
    monkeypatch.setattr(failures.tempfile, "gettempdir", lambda: str(tmp_path / "t"))
    assert failures.report_failure(ValueError("x")) == 1
    [log] = (tmp_path / "t" / "specbench-logs").iterdir()
    assert str(log) in capsys.readouterr().err


def test_debug_shows_the_traceback(monkeypatch, capsys) -> None:
    monkeypatch.setenv(failures.DEBUG_ENV, "1")
    register(monkeypatch, UsageError("no"))
    assert run_main(monkeypatch, "fail") == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_missing_engine_package_is_an_environment_problem(monkeypatch, capsys) -> None:
    monkeypatch.setattr("specbench.environment.installed_version", lambda name: None)
    register(monkeypatch, ModuleNotFoundError("No module named 'vllm'", name="vllm.v1"))
    assert run_main(monkeypatch, "fail") == 3
    assert "vLLM is not installed" in capsys.readouterr().err


def test_other_missing_modules_stay_unexpected(monkeypatch, capsys) -> None:
    register(monkeypatch, ModuleNotFoundError("No module named 'zzz'", name="zzz"))
    assert run_main(monkeypatch, "fail") == 1
    assert "unexpected ModuleNotFoundError" in capsys.readouterr().err


def test_a_command_that_fails_to_import_is_reported(monkeypatch, capsys) -> None:
    monkeypatch.setitem(COMMANDS, "broken", LazyCommand("specbench.no_such_module:x", "Broken."))
    assert run_main(monkeypatch, "broken") == 1
    assert "no_such_module" in capsys.readouterr().err


CHILD = """
import sys, time
from specbench.cli import app
def work():
    {body}
sys.modules["work_module"] = type(sys)("work_module")
sys.modules["work_module"].work = work
app.COMMANDS["work"] = app.LazyCommand("work_module:work", "Work.")
sys.argv = ["specbench", "work"]
app.main()
"""


@pytest.mark.parametrize(
    "body",
    ["for number in range(100_000): print(number)", "print('short')"],
    ids=["long output", "short output"],
)
def test_closed_pipe_is_quiet(body: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    child = subprocess.run(
        [sys.executable, "-c", CHILD.format(body=body)],
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert child.stderr == b""
    assert child.returncode == failures.EXIT_BROKEN_PIPE


def test_ctrl_c_exits_130_with_one_line() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(body="print('on', flush=True); time.sleep(60)")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "on\n"
    time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    _, error = child.communicate(timeout=30)
    assert (child.returncode, error) == (130, "interrupted\n")


def test_commands_point_at_modules_of_the_package() -> None:
    assert app_module.COMMANDS
    for command in COMMANDS.values():
        module, _, attribute = command.target.partition(":")
        assert module.startswith("specbench.cli.")
        assert attribute
