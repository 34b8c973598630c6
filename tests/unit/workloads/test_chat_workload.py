"""The hand-written chat items."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from specbench.workloads import load_workload
from specbench.workloads.chat import CHAT_FILE

ITEMS = load_workload("chat", None, seed=0)


def test_there_are_enough_of_them() -> None:
    assert len(ITEMS) >= 72


def test_many_are_in_the_middle_of_a_conversation() -> None:
    with_reply = [i for i in ITEMS if any(m.role == "assistant" for m in i.history)]
    assert len(with_reply) >= 12


def test_some_carry_a_system_message_at_the_start() -> None:
    with_system = [i for i in ITEMS if any(m.role == "system" for m in i.history)]
    assert len(with_system) >= 3
    assert all(i.history[0].role == "system" for i in with_system)


def test_history_alternates_and_ends_with_the_assistant() -> None:
    for item in ITEMS:
        roles = [m.role for m in item.history if m.role != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2), item.item_id


def test_they_are_varied() -> None:
    categories = Counter(i.category for i in ITEMS)
    assert len(categories) >= 12
    assert max(categories.values()) <= len(ITEMS) / 5


@pytest.mark.parametrize("item", ITEMS, ids=lambda i: i.item_id)
def test_output_limit_fits_a_short_answer(item: object) -> None:
    assert 48 <= item.max_tokens <= 160  # type: ignore[attr-defined]


def test_one_line_of_the_file_is_one_item_in_one_form() -> None:
    lines = CHAT_FILE.read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(ITEMS)
    for line in lines:
        assert list(json.loads(line)) == ["id", "category", "max_tokens", "messages"]
