"""Chat and code editing side by side: what one server sees from two kinds of client."""

from __future__ import annotations

import random

from specbench.records import Conversation
from specbench.workloads.base import WORKLOADS, Workload
from specbench.workloads.chat import Chat
from specbench.workloads.code_edit import CodeEdit


class Mixed(Workload):
    """Pairs of one chat item and one code edit, the order inside each pair seeded.

    However many items are taken, the two halves differ by one at most.

    Args:
        chat, code_edit: the two halves.
    """

    name = "mixed"
    description = "half chat, half code-edit, interleaved"
    source = f"{Chat.source}; {CodeEdit.source}"
    licence = f"{Chat.licence} AND {CodeEdit.licence}"

    def __init__(self, chat: Workload | None = None, code_edit: Workload | None = None) -> None:
        self.chat = chat or Chat()
        self.code_edit = code_edit or CodeEdit()

    def items(self, num_items: int | None, seed: int) -> list[Conversation]:
        """As many pairs as both halves have items, cut at ``num_items``."""
        num_pairs = None if num_items is None else (num_items + 1) // 2
        chats = self.chat.items(num_pairs, seed)
        edits = self.code_edit.items(num_pairs, seed)
        rng = random.Random(f"{self.name}:{seed}")
        items: list[Conversation] = []
        for pair in zip(chats, edits, strict=False):
            items.extend(rng.sample(pair, 2))
        return items[:num_items]


WORKLOADS.add(Mixed.name, Mixed())
