"""Feature extraction: right values, nothing twice, whole shards only."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file
from tiny_target import LAYER_IDS, VOCAB, make_responses, make_target

from specbench.errors import EnvironmentProblem, InputError, Interrupted, UsageError
from specbench.training import feature_shards, features
from specbench.training.feature_shards import FeatureShard, read_index, shard_path
from specbench.training.features import ExtractionSummary, extract_features
from specbench.training.target_model import TargetModel


def extract(
    responses: pl.DataFrame, target: TargetModel, folder: Path, **options: Any
) -> ExtractionSummary:
    settings: dict[str, Any] = {
        "layer_ids": LAYER_IDS,
        "split": "train",
        "tokens_per_shard": 60,
        "tokens_per_forward": 50,
    }
    return extract_features(responses, target, folder, **(settings | options))


def digests(folder: Path) -> dict[str, str]:
    """Content of a store: every tensor bit for bit, metadata, and the index as rows."""
    found = {"index": str(read_index(folder, "train").rows())}
    for path in folder.glob("*.safetensors"):
        digest = hashlib.sha256(str(FeatureShard(path).metadata).encode())
        for name, tensor in sorted(load_file(path).items()):
            digest.update(name.encode() + tensor.view(torch.uint8).numpy().tobytes())
        found[path.name] = digest.hexdigest()
    return found


def test_every_value_equals_a_pass_of_its_own(tmp_path: Path) -> None:
    target = make_target()
    responses = make_responses()
    summary = extract(responses, target, tmp_path)
    index = read_index(tmp_path, "train")
    assert summary == ExtractionSummary(
        num_shards=index["shard"].n_unique(),
        num_sequences=12,
        num_tokens=index["num_tokens"].sum(),
        num_already_stored=0,
        num_too_short=0,
    )
    assert summary.num_shards > 2
    for row, stored in zip(
        responses.iter_rows(named=True), index.iter_rows(named=True), strict=True
    ):
        shard = FeatureShard(shard_path(tmp_path, "train", stored["shard"]))
        check_sequence(shard, stored["position"], row, target)
        assert stored["prompt_id"] == row["prompt_id"]


def check_sequence(
    shard: FeatureShard, position: int, row: dict[str, Any], target: TargetModel
) -> None:
    start, end = shard.sequence_starts[position : position + 2].tolist()
    num_prompt = len(row["prompt_token_ids"])
    token_ids = torch.tensor(row["prompt_token_ids"] + row["response_token_ids"])
    assert shard.token_ids[start:end].tolist() == token_ids.tolist()
    assert int(shard.response_starts[position]) - start == num_prompt
    assert float(shard.temperatures[position]) == row["temperature"]
    assert shard.metadata.sources[int(shard.sources[position])] == row["source"]

    alone = target.forward(token_ids[None], LAYER_IDS)
    # Stored in bfloat16, which keeps 8 bits; a pass in other company may round differently.
    torch.testing.assert_close(
        shard.aux_hidden[start:end].float(), alone.aux_hidden[0], rtol=2**-7, atol=1e-5
    )
    torch.testing.assert_close(
        shard.final_hidden[start:end].float(), alone.final_hidden[0], rtol=2**-7, atol=1e-5
    )
    first = start + num_prompt - 1
    logits = shard.final_hidden[first:end].float() @ target.lm_head_weight.T
    torch.testing.assert_close(shard.logsumexp[first:end], logits.exp().sum(-1).log())
    assert shard.argmax[first:end].tolist() == logits.argmax(-1).tolist()
    assert shard.logsumexp[start:first].tolist() == [0.0] * (num_prompt - 1)
    assert shard.argmax[start:first].tolist() == [-1] * (num_prompt - 1)


def test_logits_in_chunks_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()
    extract(make_responses(), target, tmp_path / "whole")
    monkeypatch.setattr(features, "LOGITS_PER_CHUNK", 3 * VOCAB)
    extract(make_responses(), target, tmp_path / "chunked")
    whole = FeatureShard(shard_path(tmp_path / "whole", "train", 0))
    chunked = FeatureShard(shard_path(tmp_path / "chunked", "train", 0))
    torch.testing.assert_close(chunked.logsumexp, whole.logsumexp)
    assert torch.equal(chunked.argmax, whole.argmax)


@pytest.mark.parametrize("fails_in", ["write_index", "write_shard"])
def test_a_crash_costs_only_the_shard_at_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_in: str
) -> None:
    """The store of a run that died and was repeated equals that of an undisturbed run."""
    target, responses = make_target(), make_responses()
    extract(responses, target, tmp_path / "calm")
    real, num_calls = getattr(features, fails_in), 0

    def dies_at_third(*args: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            (tmp_path / "stormy" / ".train-partial-x").write_bytes(b"half a file")
            raise MemoryError("killed")
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(features, fails_in, dies_at_third)
        with pytest.raises(MemoryError):
            extract(responses, target, tmp_path / "stormy")
    assert read_index(tmp_path / "stormy", "train")["shard"].n_unique() == 2
    summary = extract(responses, target, tmp_path / "stormy")
    assert summary.num_already_stored > 0
    assert digests(tmp_path / "stormy") == digests(tmp_path / "calm")
    assert not list((tmp_path / "stormy").glob(".train-partial-*"))


def test_interrupt_keeps_whole_shards_and_says_so(tmp_path: Path) -> None:
    target, responses = make_target(), make_responses()

    def stop(num_done: int, num_to_do: int) -> None:
        if num_done > 70:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match=r"stopped after 1 of \d+ shards, which are kept"):
        extract(responses, target, tmp_path, progress=stop)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["train-00000.safetensors"]
    assert extract(responses, target, tmp_path).num_already_stored > 0


def test_later_responses_only_add_shards(tmp_path: Path) -> None:
    target = make_target()
    old = make_responses(seed=1)
    extract(old, target, tmp_path)
    before = digests(tmp_path)
    both = pl.concat([make_responses(seed=2), old])
    summary = extract(both, target, tmp_path)
    after = digests(tmp_path)
    assert (summary.num_already_stored, summary.num_sequences) == (12, 12)
    assert {name: after[name] for name in before if name != "index"} == {
        name: value for name, value in before.items() if name != "index"
    }
    assert extract(both, target, tmp_path) == ExtractionSummary(0, 0, 0, 24, 0)


def test_equal_samples_are_counted_not_merged(tmp_path: Path) -> None:
    target, responses = make_target(), make_responses(num_prompts=1)
    twice = pl.concat([responses, responses])
    assert extract(twice, target, tmp_path).num_sequences == 4
    assert extract(responses, target, tmp_path).num_already_stored == 2
    assert extract(twice, target, tmp_path).num_already_stored == 4


def test_other_splits_and_too_short_responses_are_left_out(tmp_path: Path) -> None:
    target = make_target()
    short = make_responses(num_prompts=1, seed=3).with_columns(
        pl.col("response_token_ids").list.head(1)
    )
    frame = pl.concat([make_responses(), make_responses(seed=4, split="test"), short])
    summary = extract(frame, target, tmp_path)
    assert (summary.num_sequences, summary.num_too_short) == (12, 2)


def test_progress_reaches_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    summary = extract(
        make_responses(), make_target(), tmp_path, progress=lambda *now: seen.append(now)
    )
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (summary.num_tokens, summary.num_tokens)


def test_a_folder_takes_one_target_and_one_list_of_layers(tmp_path: Path) -> None:
    extract(make_responses(), make_target(), tmp_path)
    with pytest.raises(UsageError, match="features of another target"):
        extract(make_responses(seed=9), make_target(seed=1), tmp_path)
    with pytest.raises(UsageError, match=r"target layers \[0, 1\], not \[1\]"):
        extract(make_responses(seed=9), make_target(), tmp_path, layer_ids=[1])
    with pytest.raises(UsageError, match="features of another target"):
        extract(make_responses(split="test"), make_target(seed=1), tmp_path, split="test")


def test_a_shard_outside_the_index_does_not_bind_the_folder(tmp_path: Path) -> None:
    """The first shard of a run that died before it wrote the index counts for nothing."""
    extract(make_responses(), make_target(seed=1), tmp_path)
    (tmp_path / "train-index.parquet").unlink()
    assert extract(make_responses(), make_target(), tmp_path).num_sequences == 12
    metadata = FeatureShard(shard_path(tmp_path, "train", 0)).metadata
    assert metadata.target_fingerprint == make_target().fingerprint


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with (
        FileLock(tmp_path / ".train.lock"),
        pytest.raises(UsageError, match="another process is extracting train features"),
    ):
        extract(make_responses(), make_target(), tmp_path)
    assert extract(make_responses(), make_target(), tmp_path).num_sequences == 12


def test_responses_of_another_target_are_refused(tmp_path: Path) -> None:
    responses = make_responses(num_prompts=1)
    for tokens, message in (
        ([VOCAB, 1], "outside the target's vocabulary of 96"),
        ([-1, 1], "outside the target's vocabulary of 96"),
        ([1] * 70, "exceed the target's context of 64"),
    ):
        other = responses.with_columns(
            pl.Series("response_token_ids", [tokens] * 2, dtype=pl.List(pl.Int32))
        )
        with pytest.raises(InputError, match=message):
            extract(other, make_target(), tmp_path)
    empty = responses.with_columns(pl.col("prompt_token_ids").list.head(0))
    with pytest.raises(InputError, match="it has no prompt tokens"):
        extract(empty, make_target(), tmp_path)


def test_a_full_disk_is_noticed_before_work_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "SLACK_BYTES", 1 << 60)
    with pytest.raises(EnvironmentProblem, match="needed"):
        extract(make_responses(), make_target(), tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train-00000.safetensors"
    path.write_bytes(b"old")

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(feature_shards, "save_file", full)
    metadata = feature_shards.ShardMetadata("f", (0,), ("chat",))
    with pytest.raises(EnvironmentProblem, match="No space left"):
        feature_shards.write_shard(path, "train", {}, metadata)
    assert path.read_bytes() == b"old"
    assert [item.name for item in tmp_path.iterdir()] == [path.name]
