"""What a workload is, how one is chosen by name, and how many of its items are taken."""

from __future__ import annotations

import os
import random
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path

from specbench.errors import UsageError
from specbench.records import Conversation
from specbench.registry import Registry
from specbench.workloads.jsonl import read_conversations
from specbench.workloads.shapes import printable


class Workload(ABC):
    """A named set of prompts in an order that depends on the seed alone.

    The first n items of a seed do not depend on how many are asked for: a short run
    measures the beginning of a long one.

    Attributes:
        name: what the command line calls it.
        description: one line for listings.
        source: where the text comes from.
        licence: SPDX identifier of that text, or a sentence where there is none.
    """

    name: str
    description: str
    source: str
    licence: str

    @abstractmethod
    def items(self, num_items: int | None, seed: int) -> list[Conversation]:
        """Distinct items in seeded order: up to ``num_items``, fewer where there are fewer.

        None asks for the workload's own size.
        """

    def load(self, num_items: int | None, seed: int) -> list[Conversation]:
        """Exactly ``num_items`` items (None: the workload's own size) for this seed.

        Past its end the workload is gone through again in the same order; the k-th copy
        of an item carries ``#k`` behind its id.

        Raises:
            UsageError: ``num_items`` is not positive.
        """
        if num_items is not None and num_items < 1:
            raise UsageError(f"the number of prompts must be at least 1, not {num_items}")
        distinct = self.items(num_items, seed)
        return distinct if num_items is None else cycle(distinct, num_items)


WORKLOADS: Registry[Workload] = Registry("workload")


class FileWorkload(Workload):
    """The prompts of a file; see :mod:`specbench.workloads.jsonl` for its shapes.

    Args:
        path: the file; read anew on every load.
        raw: send ``prompt`` items as text completions, without the chat template.
    """

    description = "prompts from a file"
    licence = "as the file's owner says"

    def __init__(self, path: Path, *, raw: bool = False) -> None:
        self.path = path
        self.raw = raw
        self.name = printable(path)
        self.source = printable(path)

    def items(self, num_items: int | None, seed: int) -> list[Conversation]:
        """All conversations of the file, shuffled, then cut; raises InputError."""
        return shuffled(read_conversations(self.path, raw=self.raw), "file", seed)[:num_items]


def get_workload(spec: str, *, raw: bool = False) -> Workload:
    """Find a workload by registered name, or by path.

    Args:
        spec: a name, or a path: anything with a path separator or ending in .jsonl/.json.
        raw: see :class:`FileWorkload`.

    Raises:
        UsageError: no such name, or ``raw`` asked of a built-in workload.
    """
    if _is_path(spec):
        # Unlike Path.expanduser this leaves "~nobody" as it is instead of failing.
        return FileWorkload(Path(os.path.expanduser(spec)), raw=raw)
    if spec not in WORKLOADS.names() and spec and Path(spec).is_file():
        raise UsageError(f"{spec!r} is no workload; to read the file of that name say './{spec}'")
    workload = WORKLOADS.get(spec)
    if raw:
        raise UsageError(f"workload {spec!r} is chat; raw text completion needs a prompt file")
    return workload


def load_workload(
    spec: str, num_items: int | None, seed: int, *, raw: bool = False
) -> list[Conversation]:
    """Load a workload given as on the command line; see :func:`get_workload`.

    Returns:
        The same items in the same order whenever the arguments are the same.

    Raises:
        UsageError: unknown name or bad count.
        InputError: the file cannot be used; the message names file and line.
    """
    return get_workload(spec, raw=raw).load(num_items, seed)


def shuffled(items: list[Conversation], stream: str, seed: int) -> list[Conversation]:
    """A seeded permutation; ``stream`` keeps equal seeds of different workloads apart."""
    order = list(items)
    random.Random(f"{stream}:{seed}").shuffle(order)
    return order


def cycle(items: list[Conversation], num_items: int) -> list[Conversation]:
    """The first ``num_items`` of the items repeated without end, ids told apart by ``#k``."""
    taken = []
    for index in range(num_items):
        lap, position = divmod(index, len(items))
        item = items[position]
        taken.append(item if lap == 0 else replace(item, item_id=f"{item.item_id}#{lap + 1}"))
    return taken


def _is_path(spec: str) -> bool:
    return "/" in spec or "\\" in spec or spec.lower().endswith((".jsonl", ".json"))
