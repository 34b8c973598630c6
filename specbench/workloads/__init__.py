"""Prompts by name or from a file. Importing this package registers the built-in workloads."""

from specbench.workloads import chat, code_edit, mixed
from specbench.workloads.base import (
    WORKLOADS,
    FileWorkload,
    Workload,
    get_workload,
    load_workload,
)

__all__ = [
    "WORKLOADS",
    "FileWorkload",
    "Workload",
    "chat",
    "code_edit",
    "get_workload",
    "load_workload",
    "mixed",
]
