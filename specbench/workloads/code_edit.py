"""Editing tasks over the installed standard library; the answer is mostly a copy."""

from __future__ import annotations

import math
import random
import sys
import sysconfig
from collections import Counter
from pathlib import Path

from specbench.errors import EnvironmentProblem
from specbench.records import Conversation
from specbench.workloads.base import WORKLOADS, Workload
from specbench.workloads.code_sources import Snippet, iter_snippets
from specbench.workloads.code_tasks import TASKS, Task

DEFAULT_NUM_ITEMS = 80

# Python text in the byte-pair vocabularies of current models has 3 to 4 characters a token.
CHARS_PER_TOKEN = 3

# Room for what the edit adds and for the code fence.
OUTPUT_ALLOWANCE = 1.1

# Keeps one request within seconds on a machine without a GPU.
MAX_OUTPUT_TOKENS = 320

_CLOSING = "Answer with the whole file in one Python code block and nothing else."


class CodeEdit(Workload):
    """Rename, annotate, document, reorder, or fix a planted bug; output the whole file.

    Built from the Python source files of the running interpreter. The items of a seed are
    stable for one Python version; another version has other files and gives other items.
    The id of an item says where its text is from: kind, interpreter and version, module
    and lines.

    Args:
        root: folder of the library; None takes the running interpreter's.
    """

    name = "code-edit"
    description = "edit a piece of the Python standard library and output the whole file"
    source = "source files of the installed Python standard library"
    licence = "PSF-2.0"

    def __init__(self, root: Path | None = None) -> None:
        self.root = root

    def items(self, num_items: int | None, seed: int) -> list[Conversation]:
        """Up to ``num_items`` tasks (None: 80), the kinds in balance from the first on.

        Raises:
            EnvironmentProblem: the interpreter was installed without its source files.
        """
        wanted = DEFAULT_NUM_ITEMS if num_items is None else num_items
        root = self.root or Path(sysconfig.get_path("stdlib"))
        counts: Counter[str] = Counter()
        items: list[Conversation] = []
        for snippet in iter_snippets(root, seed):
            if len(items) == wanted:
                break
            # The kind that is rarest so far and suits the snippet.
            for kind in sorted(TASKS, key=counts.__getitem__):
                rng = random.Random(f"code-edit {kind} {snippet}:{seed}")
                task = TASKS[kind](snippet.text, rng)
                if task is not None:
                    counts[kind] += 1
                    items.append(_conversation(kind, snippet, task))
                    break
        if not items:
            raise EnvironmentProblem(
                f"no Python source files to edit under {root}; the code-edit workload needs an "
                "interpreter that is installed with the .py files of its standard library"
            )
        return items


def max_output_tokens(code: str) -> int:
    """Output limit for a file of this size."""
    return min(MAX_OUTPUT_TOKENS, math.ceil(OUTPUT_ALLOWANCE * len(code) / CHARS_PER_TOKEN))


def _conversation(kind: str, snippet: Snippet, task: Task) -> Conversation:
    version = ".".join(map(str, sys.version_info[:3]))
    lines = f"{snippet.module}:{snippet.first_line}-{snippet.last_line}"
    return Conversation(
        item_id=f"code-edit/{kind}/{sys.implementation.name}-{version}/{lines}",
        turns=(f"{task.instruction} {_CLOSING}\n\n```python\n{task.code}```",),
        category=kind,
        max_tokens=max_output_tokens(task.code),
    )


WORKLOADS.add(CodeEdit.name, CodeEdit())
