"""Prompts by name or from a file. Importing this package registers the built-in workloads."""

from specbench.workloads import chat, code_edit, mixed
from specbench.workloads.base import (
    WORKLOADS,
    FileWorkload,
    Workload,
    get_workload,
    load_workload,
)
from specbench.workloads.code_edit import CodeEdit, max_output_tokens
from specbench.workloads.code_sources import Snippet, iter_snippets
from specbench.workloads.code_tasks import TASKS

__all__ = [
    "TASKS",
    "WORKLOADS",
    "CodeEdit",
    "FileWorkload",
    "Snippet",
    "Workload",
    "chat",
    "code_edit",
    "get_workload",
    "iter_snippets",
    "load_workload",
    "max_output_tokens",
    "mixed",
]
