"""Test prompts from files and workloads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specbench.errors import InputError, UsageError
from specbench.training.outside_prompts import (
    outside_prompts,
    outside_source,
    outside_stream,
)


def write(path: Path, *turns: list[str]) -> str:
    path.write_text("".join(json.dumps({"turns": item}) + "\n" for item in turns))
    return str(path)


def read(spec: str, **changes: object) -> list:
    options: dict = {"temperatures": [0.0, 1.0], "num_prompts": None, "max_tokens": 99}
    return outside_prompts(spec, **{**options, **changes})


def test_every_prompt_at_every_temperature(tmp_path: Path) -> None:
    path = write(tmp_path / "mt-bench.jsonl", ["one", "and two"], ["three"])
    specs = read(path)
    assert {(s.messages[0].content, s.temperature) for s in specs} == {
        (text, temperature) for text in ("one", "three") for temperature in (0.0, 1.0)
    }
    assert len({spec.prompt_id for spec in specs}) == 4
    assert {(s.source, s.split, s.max_tokens) for s in specs} == {("mt-bench", "test", 99)}
    assert {s.later_turns for s in specs if s.messages[0].content == "one"} == {("and two",)}
    assert not any(spec.may_follow_up for spec in specs)


def test_prompts_keep_their_ids_when_fewer_are_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "set.jsonl", *[[f"prompt {index}"] for index in range(9)])
    everything = {spec.prompt_id for spec in read(path)}
    first = read(path, num_prompts=3, temperatures=[1.0])
    assert len(first) == 3
    assert {spec.prompt_id for spec in first} < everything


def test_an_edited_file_gives_new_ids(tmp_path: Path) -> None:
    before = {s.prompt_id for s in read(write(tmp_path / "set.jsonl", ["one"]))}
    after = {s.prompt_id for s in read(write(tmp_path / "set.jsonl", ["another"]))}
    assert not before & after


def test_a_workload_is_not_confused_with_a_training_source() -> None:
    specs = read("code-edit", num_prompts=2)
    assert {spec.source for spec in specs} == {"workload-code-edit"}


def test_a_file_called_as_a_training_source_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "chat-self.jsonl", ["one"])
    with pytest.raises(UsageError, match="rename the file"):
        outside_source(path)


def test_stream_names_are_file_names() -> None:
    assert outside_stream("my set/ü") == "outside-my_set_"


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf")])
def test_impossible_temperatures_are_refused(tmp_path: Path, temperature: float) -> None:
    path = write(tmp_path / "set.jsonl", ["one"])
    with pytest.raises(UsageError, match="--temperature"):
        read(path, temperatures=[temperature])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.jsonl"):
        read(str(tmp_path / "none.jsonl"))
