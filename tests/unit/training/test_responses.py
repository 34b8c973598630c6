"""The response folder: shards add up, strangers and damage are refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from specbench.errors import InputError, UsageError
from specbench.training.responses import (
    Response,
    ResponseWriter,
    only_writer,
    read_responses,
    read_target,
    streams,
    without_loops,
)


def response(prompt_id: str, *, split: str = "train", tokens: int = 9) -> Response:
    return Response(prompt_id, "chat-topic", split, 0.0, [1, 2, 3], list(range(tokens)))


def writer(folder: Path, stream: str = "0", fingerprint: str = "f") -> ResponseWriter:
    return ResponseWriter(folder, stream=stream, model="default", fingerprint=fingerprint)


def test_shards_accumulate_and_are_counted_again_on_reopening(tmp_path: Path) -> None:
    first = writer(tmp_path)
    first.write([response("a"), response("b", split="test")])
    first.write([response("c")])
    again = writer(tmp_path)
    assert again.done == {"a", "b", "c"}
    assert again.num_tokens == first.num_tokens == 27
    again.write([response("d")])
    assert read_responses(tmp_path)["prompt_id"].to_list() == ["a", "b", "c", "d"]
    assert read_responses(tmp_path, "test")["prompt_id"].to_list() == ["b"]


def test_streams_keep_their_own_count(tmp_path: Path) -> None:
    writer(tmp_path, stream="1").write([response("a")])
    other = writer(tmp_path, stream="11")
    assert other.num_tokens == 0
    other.write([response("b")])
    assert writer(tmp_path, stream="1").done == {"a"}
    assert len(read_responses(tmp_path)) == 2


def test_a_stream_does_not_take_the_shards_of_a_longer_name(tmp_path: Path) -> None:
    writer(tmp_path, stream="outside-a-b").write([response("x")])
    writer(tmp_path, stream="outside-a").write([response("y")])
    assert writer(tmp_path, stream="outside-a").done == {"y"}
    assert streams(tmp_path) == ["outside-a", "outside-a-b"]


def test_unusable_prompts_and_loops_survive_reopening(tmp_path: Path) -> None:
    first = writer(tmp_path)
    first.write([response("a")], unusable=["b"], num_loop_tokens=5)
    first.write([], unusable=["c"], num_loop_tokens=2)
    again = writer(tmp_path)
    assert again.done == {"a", "b", "c"}
    assert again.num_loop_tokens == 7
    assert again.num_tokens == 9


def test_a_stream_has_one_writing_process(tmp_path: Path) -> None:
    with only_writer(tmp_path, "0"):
        with pytest.raises(UsageError, match="another process"), only_writer(tmp_path, "0"):
            pass
        with only_writer(tmp_path, "1"):
            writer(tmp_path, stream="1").write([response("a")])
    with only_writer(tmp_path, "0"):
        assert len(read_responses(tmp_path)) == 1


def test_a_writer_names_a_damaged_shard_of_its_own(tmp_path: Path) -> None:
    writer(tmp_path).write([response("a")])
    next(tmp_path.glob("*.parquet")).write_bytes(b"nothing")
    with pytest.raises(InputError, match="generate again"):
        writer(tmp_path)


def test_a_damaged_ledger_is_named(tmp_path: Path) -> None:
    (tmp_path / "generated-0.json").write_text("{}")
    with pytest.raises(InputError, match=r"generated-0\.json"):
        writer(tmp_path)


def test_tokens_come_back_as_written(tmp_path: Path) -> None:
    writer(tmp_path).write([response("a", tokens=12)])
    row = read_responses(tmp_path).row(0, named=True)
    assert row["prompt_token_ids"] == [1, 2, 3]
    assert row["response_token_ids"] == list(range(12))


def test_another_targets_folder_is_refused(tmp_path: Path) -> None:
    writer(tmp_path)
    with pytest.raises(UsageError, match="holds answers of default"):
        writer(tmp_path, fingerprint="other")


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    writer(tmp_path).write([response("a")])
    path = next(tmp_path.glob("*.parquet"))
    path.write_bytes(b"nothing")
    with pytest.raises(InputError, match=path.name):
        read_responses(tmp_path)


def test_an_empty_folder_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="drafter generate"):
        read_responses(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format_version": "x"}'])
def test_a_damaged_target_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "target.json").write_text(text)
    with pytest.raises(InputError, match=r"target\.json"):
        read_target(tmp_path)


def test_a_newer_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target.json").write_text(
        '{"format_version": 99, "model": "m", "fingerprint": "f"}'
    )
    with pytest.raises(InputError, match="newer"):
        read_target(tmp_path)


def test_a_loop_is_cut_after_its_first_round() -> None:
    assert without_loops([9, 8, 1, 2, 1, 2, 1, 2, 1, 2]) == [9, 8, 1, 2]
    assert without_loops([1, 2, 3, 4]) == [1, 2, 3, 4]
    assert without_loops([]) == []
