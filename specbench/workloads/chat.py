"""General chat, written for this project."""

from __future__ import annotations

from pathlib import Path

from specbench.records import Conversation
from specbench.workloads.base import WORKLOADS, Workload, shuffled
from specbench.workloads.jsonl import read_conversations

CHAT_FILE = Path(__file__).with_name("chat.jsonl")


class Chat(Workload):
    """Everyday requests whose good answer is short, a part of them late in a conversation.

    One line of ``chat.jsonl`` is one item: OpenAI messages, the last one to be answered.
    Output limits are close to the length of a good answer, because a small model that is
    let run on after it has answered falls into loops.
    """

    name = "chat"
    description = "everyday questions and tasks with short answers, some in mid-conversation"
    source = "written for specbench"
    licence = "Apache-2.0"

    def items(self, num_items: int | None, seed: int) -> list[Conversation]:
        """All items in seeded order, cut at ``num_items``."""
        return shuffled(read_conversations(CHAT_FILE), self.name, seed)[:num_items]


WORKLOADS.add(Chat.name, Chat())
