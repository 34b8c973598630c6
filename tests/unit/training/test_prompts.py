"""Training prompts: repeatable, split without leaks, every source present."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from specbench.training.prompts import (
    PromptSpec,
    documented_stub,
    follow_up,
    held_out_modules,
    iter_prompts,
    split_of,
)
from specbench.workloads import load_workload


@pytest.fixture(scope="module")
def specs() -> list[PromptSpec]:
    return list(itertools.islice(iter_prompts(3), 3000))


def module_of(spec: PromptSpec) -> str:
    return spec.prompt_id.split("/")[-1].split(":")[0]


def test_the_same_seed_gives_the_same_prompts(specs: list[PromptSpec]) -> None:
    assert list(itertools.islice(iter_prompts(3), 200)) == specs[:200]


def test_another_seed_gives_other_prompts(specs: list[PromptSpec]) -> None:
    other = {spec.prompt_id for spec in itertools.islice(iter_prompts(4), 500)}
    assert not other & {spec.prompt_id for spec in specs}


def test_ids_are_unique(specs: list[PromptSpec]) -> None:
    assert len({spec.prompt_id for spec in specs}) == len(specs)


def test_every_source_and_temperature_has_its_share(specs: list[PromptSpec]) -> None:
    sources = Counter(spec.source for spec in specs)
    assert sources.keys() == {"chat-self", "chat-topic", "code-edit", "code-write"}
    assert 0.2 < sources["code-edit"] / len(specs) < 0.36
    temperatures = Counter(spec.temperature for spec in specs)
    assert temperatures.keys() == {0.0, 0.7, 1.0}
    assert 0.4 < temperatures[0.0] / len(specs) < 0.6


def test_code_is_split_by_source_file(specs: list[PromptSpec]) -> None:
    code = [spec for spec in specs if spec.source.startswith("code")]
    test = {module_of(spec) for spec in code if spec.split == "test"}
    train = {module_of(spec) for spec in code if spec.split == "train"}
    assert test
    assert not test & train


def test_the_files_of_the_code_edit_workload_are_never_trained_on(
    specs: list[PromptSpec],
) -> None:
    modules = {
        item.item_id.split("/")[-1].split(":")[0] for item in load_workload("code-edit", None, 0)
    }
    assert modules == held_out_modules()
    trained = {
        module_of(spec)
        for spec in specs
        if spec.source.startswith("code") and spec.split == "train"
    }
    assert not modules & trained


def test_a_topic_is_on_one_side_of_the_split(specs: list[PromptSpec]) -> None:
    texts = {"train": set(), "test": set()}
    for spec in specs:
        if spec.source == "chat-topic":
            assert spec.messages is not None
            texts[spec.split].add(spec.messages[0].content)
    assert texts["test"]
    assert not texts["test"] & texts["train"]


def test_no_training_prompt_is_an_item_of_the_chat_workload(specs: list[PromptSpec]) -> None:
    items = {turn for item in load_workload("chat", None, 0) for turn in item.turns}
    asked = {spec.messages[-1].content for spec in specs if spec.messages}
    assert not items & asked


def test_the_test_share_is_about_a_twentieth() -> None:
    share = sum(split_of(f"key {index}") == "test" for index in range(10_000)) / 10_000
    assert 0.04 < share < 0.06


def test_a_follow_up_keeps_the_conversation_and_its_split(specs: list[PromptSpec]) -> None:
    first = next(spec for spec in specs if spec.source == "chat-topic")
    second = follow_up(first, "An answer.", random.Random(0))
    assert second.messages is not None
    assert first.messages is not None
    assert [message.role for message in second.messages] == ["user", "assistant", "user"]
    assert second.messages[:2] == (*first.messages, second.messages[1])
    assert (second.split, second.source) == (first.split, first.source)
    assert second.prompt_id != first.prompt_id


def test_a_stub_ends_with_its_docstring() -> None:
    text = 'import os\n\ndef f(x):\n    """Double x."""\n    return 2 * x\n'
    assert documented_stub(text) == 'def f(x):\n    """Double x."""\n'


@pytest.mark.parametrize(
    "text", ["x = 1\n", "def f(x):\n    return x\n", 'def f():\n    """Only."""\n']
)
def test_code_without_a_body_to_write_has_no_stub(text: str) -> None:
    assert documented_stub(text) is None
