"""What every workload must satisfy, built-in or from a file, and choosing one by name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.errors import InputError, UsageError
from specbench.records import Conversation
from specbench.workloads import WORKLOADS, FileWorkload, get_workload, load_workload
from specbench.workloads.base import cycle, shuffled

BUILT_IN = ["chat", "code-edit", "mixed"]


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"id": {k}, "prompt": "question {k}"}}\n' for k in range(20)))
    return path


@pytest.fixture(params=[*BUILT_IN, "file"])
def spec(request: pytest.FixtureRequest, prompt_file: Path) -> str:
    return str(prompt_file) if request.param == "file" else str(request.param)


def test_built_in_workloads_are_registered() -> None:
    assert set(BUILT_IN) <= set(WORKLOADS.names())


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_workloads_say_what_they_are(name: str) -> None:
    workload = WORKLOADS.get(name)
    assert workload.name == name
    assert workload.description
    assert workload.source
    assert workload.licence


def test_same_seed_same_items_in_the_same_order(spec: str) -> None:
    assert load_workload(spec, 12, seed=3) == load_workload(spec, 12, seed=3)


def test_another_seed_gives_another_order(spec: str) -> None:
    first, second = load_workload(spec, 12, seed=0), load_workload(spec, 12, seed=1)
    assert [i.item_id for i in first] != [i.item_id for i in second]


def test_negative_seed_is_a_seed_of_its_own(spec: str) -> None:
    assert load_workload(spec, 12, seed=-1) != load_workload(spec, 12, seed=1)


def test_short_run_is_the_beginning_of_a_long_one(spec: str) -> None:
    assert load_workload(spec, 7, seed=5) == load_workload(spec, 16, seed=5)[:7]


def test_items_are_distinct_and_sendable(spec: str) -> None:
    items = load_workload(spec, None, seed=0)
    assert len({i.item_id for i in items}) == len(items)
    assert len({(i.history, i.turns) for i in items}) == len(items)
    for item in items:
        assert item.text is None
        assert item.turns
        assert all(turn.strip() for turn in item.turns)
        assert item.max_tokens is None or item.max_tokens > 0


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_items_fit_a_small_context(name: str) -> None:
    """Prompt and answer stay far below 2,048 tokens even at 2 characters a token."""
    for item in load_workload(name, None, seed=0):
        num_chars = sum(len(m.content) for m in item.history) + sum(map(len, item.turns))
        assert item.max_tokens is not None
        assert num_chars / 2 + item.max_tokens < 1500


@pytest.mark.parametrize("name", ["chat", "mixed"])
def test_more_items_than_there_are_repeat_with_their_own_ids(name: str) -> None:
    size = len(load_workload("chat", None, seed=2)) * (2 if name == "mixed" else 1)
    items = load_workload(name, size + 3, seed=2)
    assert len(items) == size + 3
    assert len({i.item_id for i in items}) == size + 3
    for original, copy in zip(items, items[size:], strict=False):
        assert copy.item_id == f"{original.item_id}#2"
        assert (copy.history, copy.turns) == (original.history, original.turns)


@pytest.mark.parametrize("num_items", [0, -4])
def test_no_items_cannot_be_asked_for(spec: str, num_items: int) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        load_workload(spec, num_items, seed=0)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"unknown workload 'caht'.*chat.*did you mean 'chat'"):
        load_workload("caht", 1, seed=0)


@pytest.mark.parametrize("spec", ["x.jsonl", "x.JSON", "folder/x", "./chat", "~nobody-here/x"])
def test_whatever_looks_like_a_path_is_read_as_one(spec: str) -> None:
    assert isinstance(get_workload(spec), FileWorkload)
    with pytest.raises(InputError, match="no such file"):
        load_workload(spec, 1, seed=0)


def test_home_folder_is_expanded(monkeypatch: pytest.MonkeyPatch, prompt_file: Path) -> None:
    monkeypatch.setenv("HOME", str(prompt_file.parent))
    assert len(load_workload("~/prompts.jsonl", None, seed=0)) == 20


def test_file_that_is_named_like_a_workload_is_pointed_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").write_text('{"prompt": "hello"}\n')
    with pytest.raises(UsageError, match=r"say '\./mine'"):
        load_workload("mine", 1, seed=0)
    assert load_workload("./mine", 1, seed=0)[0].turns == ("hello",)


def test_raw_completion_is_for_files_only(prompt_file: Path) -> None:
    assert load_workload(str(prompt_file), 1, seed=0, raw=True)[0].text is not None
    with pytest.raises(UsageError, match="raw text completion"):
        load_workload("chat", 1, seed=0, raw=True)


def test_mixed_is_half_and_half_however_much_is_taken() -> None:
    items = load_workload("mixed", None, seed=4)
    for taken in range(1, len(items) + 1):
        kinds = Counter(i.item_id.split("/")[0] for i in items[:taken])
        assert abs(kinds["chat"] - kinds["code-edit"]) <= 1
    firsts = {i.item_id.split("/")[0] for i in items[::2]}
    assert firsts == {"chat", "code-edit"}


def test_items_do_not_depend_on_the_process() -> None:
    """Set and dictionary order of strings changes with the hash seed."""
    code = "import specbench.workloads as w; print(w.load_workload('mixed', 60, 0))"
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0].count(b"Conversation(") == 60


def test_workloads_import_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, specbench.workloads as w; w.load_workload('mixed', 4, 0); "
        "sys.exit(bool({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


ITEMS = [Conversation(item_id=f"item-{k}", turns=(f"t{k}",)) for k in range(9)]


@given(st.integers(1, 9), st.integers(1, 60))
def test_cycle_uses_every_item_equally_often(num_distinct: int, num_items: int) -> None:
    items = cycle(ITEMS[:num_distinct], num_items)
    assert len({i.item_id for i in items}) == num_items
    uses = Counter(i.turns for i in items)
    assert max(uses.values()) - min(uses.values()) <= (num_items % num_distinct != 0)


@given(st.integers())
def test_shuffle_is_a_permutation(seed: int) -> None:
    order = shuffled(ITEMS, "x", seed)
    assert sorted(i.item_id for i in order) == [i.item_id for i in ITEMS]
