"""Rules about the repository itself that no linter holds."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_LINES = 400

# What the engine adapter may use of vLLM; everything else belongs into specbench/vllm_plugin.
PUBLIC_VLLM_MODULES = {
    "vllm",
    "vllm.exceptions",
    "vllm.inputs",
    "vllm.usage.usage_lib",
    "vllm.sampling_params",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.exceptions",
}

# Traces of one machine; split so that this file does not hold them itself.
MACHINE_PATHS = ("/wo" + "rk/", "/t" + "mp/", "shared/" + "prototype")


def project_files() -> list[Path]:
    """Files that are in the repository or would be added to it."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True).stdout
    paths = [REPOSITORY / name for name in listed.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]


def python_files(*folders: str) -> list[Path]:
    """Python files of top-level folders, symbolic links not followed."""
    return [
        path
        for path in project_files()
        if path.suffix == ".py" and path.relative_to(REPOSITORY).parts[0] in folders
    ]


def vllm_modules(path: Path) -> set[str]:
    """Modules of vLLM that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {name for name in found if name.split(".")[0] == "vllm"}


def test_the_checks_see_the_project() -> None:
    names = {path.name for path in python_files("specbench", "kernels", "tests")}
    assert {"records.py", "app.py", Path(__file__).name} <= names


@pytest.mark.parametrize("flags", [[], ["-P"]], ids=["repository on the path", "safe path"])
def test_kernels_is_no_regular_package_here(flags: list[str]) -> None:
    """Transformers probes for a package of this name; ours must never answer."""
    code = (
        "import importlib.util\n"
        "spec = importlib.util.find_spec('kernels')\n"
        "print(spec.origin if spec and spec.origin else '')"
    )
    result = subprocess.run(
        [sys.executable, *flags, "-c", code],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    origin = result.stdout.strip()
    assert not origin or not Path(origin).resolve().is_relative_to(REPOSITORY)


def test_no_folder_of_kernels_is_a_package() -> None:
    assert list((REPOSITORY / "kernels").rglob("__init__.py")) == []


@pytest.mark.parametrize("name", ["kernels", "calibrations"])
def test_links_into_the_package(name: str) -> None:
    link = REPOSITORY / "specbench" / name
    assert link.is_symlink()
    assert link.resolve() == REPOSITORY / name


def test_files_stay_short() -> None:
    lengths = {
        str(path.relative_to(REPOSITORY)): len(path.read_text(encoding="utf-8").splitlines())
        for path in python_files("specbench", "kernels")
    }
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}


def test_every_room_says_what_it_is_for() -> None:
    rooms = [path for path in python_files("specbench") if path.name == "__init__.py"]
    assert rooms
    silent = [
        str(path.relative_to(REPOSITORY))
        for path in rooms
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert silent == []


def test_the_engine_adapter_uses_only_public_vllm() -> None:
    used = vllm_modules(REPOSITORY / "specbench" / "engines" / "vllm.py")
    assert used
    assert used <= PUBLIC_VLLM_MODULES


def test_no_traces_of_one_machine() -> None:
    found = []
    for path in project_files():
        text = path.read_bytes()
        if b"\0" in text[:4096]:
            continue
        for number, line in enumerate(text.decode("utf-8", errors="replace").splitlines(), 1):
            if any(trace in line for trace in MACHINE_PATHS):
                found.append(f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()[:80]}")
    assert found == []


def test_calibrations_hold_no_code_and_state_their_origin() -> None:
    folders = [path for path in (REPOSITORY / "calibrations").iterdir() if path.is_dir()]
    assert folders
    for folder in folders:
        assert (folder / "provenance.json").is_file(), folder.name
        assert list(folder.rglob("*.py")) == [], folder.name
