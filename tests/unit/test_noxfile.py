"""The set-up commands agree with the project they set up."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from specbench import environment
from specbench.engines import default_model

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def loaded() -> ModuleType:
    """Loaded once: nox warns of sessions that are registered twice."""
    spec = importlib.util.spec_from_file_location("specbench_noxfile", REPOSITORY / "noxfile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def noxfile(loaded: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.setattr(loaded, "ENVIRONMENT", tmp_path)
    return loaded


def test_constants_agree_with_the_package(noxfile: ModuleType) -> None:
    package = f"{default_model.SOURCE_PACKAGE}=={default_model.SOURCE_VERSION}"
    assert package == noxfile.MODEL_PACKAGE
    assert environment.CPU_TORCH_INDEX == noxfile.CPU_TORCH_INDEX
    assert f"torch=={environment.CPU_TORCH_VERSION}+cpu" in noxfile.TORCH_HELP


def test_a_stamp_holds_until_the_project_file_changes(
    noxfile: ModuleType, tmp_path: Path, monkeypatch
) -> None:
    assert not noxfile.is_stamped("cpu")
    noxfile.write_stamp("cpu")
    assert noxfile.is_stamped("cpu")
    assert not noxfile.is_stamped("dev")
    other = tmp_path / "other"
    other.mkdir()
    (other / "pyproject.toml").write_text("changed")
    monkeypatch.setattr(noxfile, "REPOSITORY", other)
    assert not noxfile.is_stamped("cpu")


@pytest.mark.parametrize(("code", "expected"), [("", True), ("raise SystemExit(3)", False)])
def test_succeeds(noxfile: ModuleType, code: str, expected: bool) -> None:
    assert noxfile.succeeds(Path(sys.executable), "-c", code) is expected


def test_succeeds_without_the_program(noxfile: ModuleType, tmp_path: Path) -> None:
    assert noxfile.succeeds(tmp_path / "missing") is False


def test_the_script_starts_nox_with_the_sessions() -> None:
    result = subprocess.run(
        [sys.executable, "noxfile.py", "--list"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    for session in ("demo", "tests", "slow", "lint"):
        assert f" {session} -> " in result.stdout


@pytest.mark.parametrize("session", ["demo", "tests"])
def test_the_readme_names_the_commands(session: str) -> None:
    assert f"python3.11 noxfile.py {session}" in (REPOSITORY / "README.md").read_text()


def test_ci_runs_the_same_command() -> None:
    script = REPOSITORY / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "python3.11 noxfile.py tests" in script.read_text()
