"""Prompt files: the four shapes, what is tolerated, and one clear line for what is not."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specbench.errors import InputError
from specbench.records import Conversation, Message
from specbench.workloads.jsonl import read_conversations

DATA = Path(
    os.environ.get("SPECBENCH_DATA") or Path(__file__).parents[3].resolve().parent / "shared/data"
)


def _write(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    return path


def _write_items(tmp_path: Path, *items: dict[str, Any]) -> Path:
    return _write(tmp_path, "".join(json.dumps(item) + "\n" for item in items))


def _message(path: Path, *, raw: bool = False) -> str:
    with pytest.raises(InputError) as caught:
        read_conversations(path, raw=raw)
    message = str(caught.value)
    assert "\n" not in message
    message.encode("utf-8")
    return message


# Shapes -------------------------------------------------------------------------------


def test_turns(tmp_path: Path) -> None:
    path = _write_items(
        tmp_path, {"question_id": 81, "category": "writing", "turns": ["one", "two"]}
    )
    assert read_conversations(path) == [
        Conversation(item_id="81", turns=("one", "two"), category="writing")
    ]


def test_prompt_as_user_turn_and_as_raw_text(tmp_path: Path) -> None:
    path = _write_items(tmp_path, {"id": "a", "prompt": "Say hi", "output_tokens": 9})
    assert read_conversations(path) == [Conversation(item_id="a", turns=("Say hi",), max_tokens=9)]
    assert read_conversations(path, raw=True) == [
        Conversation(item_id="a", text="Say hi", max_tokens=9)
    ]


def test_sharegpt_history_ends_before_the_last_human_message(tmp_path: Path) -> None:
    said = [("system", "s"), ("human", "h1"), ("gpt", ""), ("human", "h2"), ("gpt", "g2")]
    path = _write_items(
        tmp_path, {"id": "x", "conversations": [{"from": f, "value": v} for f, v in said]}
    )
    history = (Message("system", "s"), Message("user", "h1"), Message("assistant", ""))
    assert read_conversations(path) == [Conversation(item_id="x", history=history, turns=("h2",))]


def test_messages_with_text_parts_and_a_trailing_reply(tmp_path: Path) -> None:
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "dropped"},
    ]
    path = _write_items(tmp_path, {"messages": messages, "max_tokens": 5})
    assert read_conversations(path) == [
        Conversation(
            item_id="prompts:1", history=(Message("system", "d"),), turns=("ab",), max_tokens=5
        )
    ]


def test_json_array_of_items(tmp_path: Path) -> None:
    path = _write(tmp_path, json.dumps([{"prompt": "a"}, {"prompt": "b"}], indent=1))
    assert [c.turns for c in read_conversations(path)] == [("a",), ("b",)]


# Tolerated ----------------------------------------------------------------------------


def test_byte_order_mark_blank_lines_and_windows_line_ends(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf\r\n{"prompt": "a"}\r\n\r\n  \n{"prompt": "b"}'
    items = read_conversations(_write(tmp_path, content))
    assert [(c.item_id, c.turns) for c in items] == [
        ("prompts:2", ("a",)),
        ("prompts:5", ("b",)),
    ]


def test_unicode_line_separators_inside_a_string_do_not_end_the_line(tmp_path: Path) -> None:
    text = "a\u2028b\u0085c\u2029d"
    path = _write(tmp_path, json.dumps({"prompt": text}, ensure_ascii=False) + "\n")
    assert read_conversations(path)[0].turns == (text,)


def test_escaped_surrogate_pair_is_one_character(tmp_path: Path) -> None:
    path = _write(tmp_path, '{"prompt": "\\ud83d\\ude00"}')
    assert read_conversations(path)[0].turns == ("\U0001f600",)


def test_null_means_absent(tmp_path: Path) -> None:
    path = _write_items(tmp_path, {"id": None, "category": None, "max_tokens": None, "prompt": "a"})
    assert read_conversations(path) == [Conversation(item_id="prompts:1", turns=("a",))]


def test_repeated_ids_are_told_apart(tmp_path: Path) -> None:
    ids = ["a", "a@4", "b#2", "a"]
    path = _write_items(tmp_path, *({"id": i, "prompt": "x"} for i in ids))
    found = [c.item_id for c in read_conversations(path)]
    assert found == ["a", "a@4", "b#2@3", "a@4@4"]


def test_sharegpt_without_a_human_message_is_left_out_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    silent = [[], [{"from": "gpt", "value": "hello"}], [{"from": "human", "value": " "}]]
    spoken = [{"from": "human", "value": "hi"}]
    path = _write_items(tmp_path, *({"conversations": c} for c in [*silent, spoken]))
    with caplog.at_level(logging.WARNING):
        assert [c.turns for c in read_conversations(path)] == [("hi",)]
    assert "left out 3 items without a human message" in caplog.text
    only_silent = _write_items(tmp_path, *({"conversations": c} for c in silent))
    assert "none of its 3 items has a human message" in _message(only_silent)


# Refused ------------------------------------------------------------------------------


def test_missing_file_and_directory(tmp_path: Path) -> None:
    assert "no such file" in _message(tmp_path / "none.jsonl")
    assert "is a directory" in _message(tmp_path)
    assert "cannot be read" in _message(Path("nul\0byte.jsonl"))
    file_as_folder = _write(tmp_path, "{}") / "x.jsonl"
    assert "cannot be read" in _message(file_as_folder)


@pytest.mark.parametrize("content", ["", "\n \n", "\ufeff", "[]"])
def test_empty_file(tmp_path: Path, content: str) -> None:
    assert "no prompts in this file (empty)" in _message(_write(tmp_path, content))


def test_not_utf8_names_the_line(tmp_path: Path) -> None:
    path = _write(tmp_path, b'{"prompt": "a"}\n{"prompt": "\xe9"}\n')
    assert "line 2: byte 0xe9 is not UTF-8" in _message(path)


def test_undecodable_file_name_can_be_printed(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jsonl"))
    assert "\\udcff.jsonl" in _message(path)


@pytest.mark.parametrize(
    "bad", ["{", '{"prompt": }', "not json", "\x00", "1" * 5000, "[" * 100_000, '{"a": 1} x']
)
def test_unreadable_json_names_the_line(tmp_path: Path, bad: str) -> None:
    message = _message(_write(tmp_path, f'{{"prompt": "a"}}\n\n{bad}\n'))
    assert "prompts.jsonl, line 3: " in message
    assert "not readable as JSON" in message
    assert "expected one JSON object per line" in message


@pytest.mark.parametrize("bad", ["[1, 2", "[" * 100_000, '[{"prompt": "a"},\n]'])
def test_unreadable_json_array(tmp_path: Path, bad: str) -> None:
    assert "not readable as JSON" in _message(_write(tmp_path, bad))


@pytest.mark.parametrize(
    ("value", "kind"),
    [("3", "a number"), ('"text"', "a string"), ("null", "null"), ("true", "true or false")],
)
def test_line_that_is_no_object(tmp_path: Path, value: str, kind: str) -> None:
    message = _message(_write(tmp_path, f'{{"prompt": "a"}}\n{value}\n'))
    assert f"line 2: expected a JSON object, found {kind}" in message


def test_array_item_that_is_no_object(tmp_path: Path) -> None:
    message = _message(_write(tmp_path, '[{"prompt": "a"}, 3]'))
    assert "item 2: expected a JSON object, found a number" in message


def test_unknown_shape_lists_the_keys_found(tmp_path: Path) -> None:
    message = _message(_write_items(tmp_path, {"text": "a", "label": 1}))
    assert "line 1: no prompt found; its keys are 'text', 'label'; expected one of" in message
    assert "it has no keys" in _message(_write(tmp_path, "{}"))
    many = {f"k{n}": 0 for n in range(11)}
    assert "'k7' and 3 more" in _message(_write_items(tmp_path, many))


def test_second_shape_in_one_file(tmp_path: Path) -> None:
    message = _message(_write_items(tmp_path, {"prompt": "a"}, {"turns": ["b"]}))
    assert "line 2: no 'prompt', the shape of this file's first item" in message
    assert "its keys are 'turns'" in message


def test_raw_needs_the_prompt_shape(tmp_path: Path) -> None:
    path = _write_items(tmp_path, {"turns": ["a"]})
    assert "raw text completion needs 'prompt' items" in _message(path, raw=True)


USER = {"role": "user", "content": "u"}


@pytest.mark.parametrize(
    ("item", "problem"),
    [
        ({"prompt": 3}, "'prompt' must be a string, found a number"),
        ({"prompt": " \n"}, "'prompt' is blank"),
        ({"turns": "a"}, "'turns' must be a list, found a string"),
        ({"turns": []}, "'turns' is empty"),
        ({"turns": ["a", None]}, "'turns'[1] must be a string, found null"),
        ({"turns": ["a", ""]}, "'turns'[1] is blank"),
        ({"messages": {}}, "'messages' must be a list, found an object"),
        ({"messages": []}, "no user message to answer"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "no user message to answer"),
        ({"messages": [USER, {"role": "system", "content": "s"}]}, "ends with a system message"),
        ({"messages": [{"role": "user", "content": " "}]}, "the last user message is blank"),
        ({"messages": ["u"]}, "'messages'[0] must be an object, found a string"),
        ({"messages": [{"role": "user"}]}, "'messages'[0] has no 'content'"),
        ({"messages": [{"role": "tool", "content": "t"}, USER]}, "has role 'tool'; expected one"),
        ({"messages": [{"role": 1, "content": "t"}]}, "'messages'[0]['role'] must be a string"),
        ({"messages": [{"role": "user", "content": None}]}, "['content'] must be a string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "['content'][0] is not a text part",
        ),
        ({"conversations": "a"}, "'conversations' must be a list"),
        ({"conversations": [{"from": "human"}]}, "'conversations'[0] has no 'value'"),
        ({"conversations": [{"from": "cat", "value": "m"}]}, "has from 'cat'; expected one of"),
        ({"prompt": "a", "id": [1]}, "the id must be a string, found a list"),
        ({"prompt": "a", "id": True}, "the id must be a string, found true or false"),
        ({"prompt": "a", "category": 3}, "'category' must be a string"),
        ({"prompt": "a", "max_tokens": "9"}, "'max_tokens' must be a whole number"),
        ({"prompt": "a", "max_tokens": 9.5}, "'max_tokens' must be a whole number"),
        ({"prompt": "a", "output_tokens": True}, "'output_tokens' must be a whole number"),
        ({"prompt": "a", "max_tokens": 0}, "'max_tokens' must be at least 1, found 0"),
        ({"prompt": "a\ud800"}, "half a surrogate pair (\\ud800)"),
        ({"prompt": "a", "id": "\udfff"}, "half a surrogate pair (\\udfff)"),
        ({"\ud800": "a"}, "its keys are '\\ud800'"),
    ],
)
def test_wrong_value_names_line_and_place(
    tmp_path: Path, item: dict[str, Any], problem: str
) -> None:
    message = _message(_write(tmp_path, "\n" + json.dumps(item) + "\n"))
    assert "prompts.jsonl, line 2: " in message
    assert problem in message


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "type", "text"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)
FIELDS = ["prompt", "turns", "messages", "conversations", "id", "category", "max_tokens"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=4), max_size=3))
def test_any_json_is_read_or_refused(tmp_path: Path, items: list[dict[str, Any]]) -> None:
    path = _write_items(tmp_path, *items)
    try:
        conversations = read_conversations(path)
    except InputError:
        return
    assert len({c.item_id for c in conversations}) == len(conversations) > 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(tmp_path: Path, content: bytes) -> None:
    path = _write(tmp_path, content)
    try:
        conversations = read_conversations(path)
    except InputError:
        assert _message(path).startswith(str(path))
    else:
        assert conversations


# Published files ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num_items", "num_turns"),
    [
        ("spec_bench_questions.jsonl", 480, None),
        ("mt-bench.jsonl", 80, 2),
        ("humaneval.jsonl", 164, 1),
        ("gsm8k.jsonl", 1319, 1),
    ],
)
def test_published_files_load_completely(name: str, num_items: int, num_turns: int | None) -> None:
    path = DATA / name
    if not path.is_file():
        pytest.skip(f"{name} is not in {DATA}; set SPECBENCH_DATA to the folder that holds it")
    conversations = read_conversations(path)
    assert len(conversations) == num_items
    assert len({c.item_id for c in conversations}) == num_items
    if num_turns is None:
        # Six tasks of 80; the multi-turn one is itself in eight categories of ten.
        assert [c.item_id for c in conversations[:2]] == ["81", "82"]
        assert sum(len(c.turns) == 2 for c in conversations) == 80
        tasks = [c.category for c in conversations if len(c.turns) == 1]
        assert sorted({tasks.count(task) for task in tasks}) == [80]
        assert len(set(tasks)) == 5
    else:
        assert {len(c.turns) for c in conversations} == {num_turns}
