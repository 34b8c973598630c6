"""Answers of the target, in Parquet shards that only ever grow in number.

Format 1, one row an answer: prompt_id, source, split, temperature, prompt_token_ids and
response_token_ids (lists of int32). Beside the shards, ``target.json`` names the model. A
*stream* is what one command writes: the training prompts of one seed, or a set of outside
prompts; each numbers its own shards.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl
from filelock import FileLock, Timeout

from specbench.cache import ensure_writable, write_text_atomically
from specbench.errors import EnvironmentProblem, InputError, UsageError
from specbench.metrics.repetition import cycle_mask

FORMAT_VERSION = 1
TARGET_FILE = "target.json"
SCHEMA: dict[str, Any] = {
    "prompt_id": pl.String,
    "source": pl.String,
    "split": pl.String,
    "temperature": pl.Float64,
    "prompt_token_ids": pl.List(pl.Int32),
    "response_token_ids": pl.List(pl.Int32),
}
# Shorter answers have no room for a block after their first token.
MIN_RESPONSE_TOKENS = 8
# Room asked for before generation starts; a million tokens take a few MB.
NEED_BYTES = 64 * 1024**2


@dataclass(frozen=True)
class Response:
    """One answer of the target."""

    prompt_id: str
    source: str
    split: str
    temperature: float
    prompt_token_ids: list[int]
    response_token_ids: list[int]


def without_loops(token_ids: Sequence[int]) -> list[int]:
    """The answer up to the first token that only repeats a loop; see cycle_mask.

    A drafter learns nothing from a loop, and a served model falls into one far less often
    than a small one.
    """
    marked = cycle_mask(token_ids).nonzero()[0]
    return list(token_ids[: int(marked[0])] if marked.size else token_ids)


class ResponseWriter:
    """Writes the shards of one stream into a folder that other streams may share.

    Beside its shards a stream keeps ``generated-<stream>.json``: the prompts that gave no
    usable answer, so that they are not tried again, and how many tokens were cut as loops.

    Attributes:
        done: ids of all prompts that need no further answer.
        num_tokens: response tokens of this stream on disk.
        num_loop_tokens: tokens cut from its answers as loops.

    Raises:
        EnvironmentProblem: the folder cannot be written.
        InputError: a shard of the stream is damaged.
        UsageError: the folder holds another target's answers.
    """

    def __init__(self, folder: Path, *, stream: str, model: str, fingerprint: str) -> None:
        self.folder = folder
        self.stream = stream
        ensure_writable(folder, NEED_BYTES)
        _check_target(folder, model, fingerprint)
        mine = _stream_shards(folder, stream)
        self._next = 1 + max((int(path.stem.rsplit("-", 1)[1]) for path in mine), default=-1)
        frames = [_read_shard(path) for path in mine]
        self._unusable, self.num_loop_tokens = _read_ledger(self._ledger_path)
        self.done: set[str] = set(self._unusable)
        self.num_tokens = 0
        for frame in frames:
            self._count(frame)

    @property
    def _ledger_path(self) -> Path:
        return self.folder / f"generated-{self.stream}.json"

    def write(
        self,
        responses: Sequence[Response],
        *,
        unusable: Sequence[str] = (),
        num_loop_tokens: int = 0,
    ) -> None:
        """Add one shard, atomically.

        Args:
            responses: answers; none adds no shard.
            unusable: ids of prompts that gave no answer worth keeping.
            num_loop_tokens: tokens cut from these answers.

        Raises:
            EnvironmentProblem: the disk is full or the folder has become read-only.
        """
        if responses:
            frame = pl.DataFrame([asdict(response) for response in responses], schema=SCHEMA)
            self._write_shard(frame)
            self._next += 1
            self._count(frame)
        if unusable or num_loop_tokens:
            self._unusable.update(unusable)
            self.done.update(unusable)
            self.num_loop_tokens += num_loop_tokens
            facts = {
                "format_version": FORMAT_VERSION,
                "num_loop_tokens": self.num_loop_tokens,
                "unusable_prompt_ids": sorted(self._unusable),
            }
            write_text_atomically(self._ledger_path, json.dumps(facts, indent=1) + "\n")

    def _count(self, frame: pl.DataFrame) -> None:
        self.done.update(frame["prompt_id"])
        self.num_tokens += int(frame["response_token_ids"].list.len().sum())

    def _write_shard(self, frame: pl.DataFrame) -> None:
        path = self.folder / f"responses-{self.stream}-{self._next:05d}.parquet"
        temporary = path.with_suffix(".partial")
        try:
            frame.write_parquet(temporary)
            os.replace(temporary, path)
        except (OSError, pl.exceptions.PolarsError) as problem:
            temporary.unlink(missing_ok=True)
            raise EnvironmentProblem(
                f"cannot write {path} ({problem}); make room and run the same command again"
            ) from problem


@contextmanager
def only_writer(folder: Path, stream: str) -> Iterator[None]:
    """Keep other processes off a stream while the context is open.

    Raises:
        EnvironmentProblem: the folder cannot be written.
        UsageError: another process is writing the stream.
    """
    ensure_writable(folder, NEED_BYTES)
    lock = FileLock(folder / f".{stream}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UsageError(
            f"{folder}: another process is generating {stream} here; wait for it to end or "
            "choose another --seed"
        ) from None
    try:
        yield
    finally:
        lock.release()


def count_loop_tokens(folder: Path) -> dict[str, int]:
    """Tokens cut as loops, by stream; streams that never counted them are left out."""
    return {
        path.stem.removeprefix("generated-"): _read_ledger(path)[1]
        for path in sorted(folder.glob("generated-*.json"))
    }


def streams(folder: Path) -> list[str]:
    """Names of the streams in a folder; a training stream is called as its seed."""
    found = {path.stem.removeprefix("responses-").rsplit("-", 1)[0] for path in shard_paths(folder)}
    return sorted(found)


def shard_paths(folder: Path) -> list[Path]:
    """All shards, in name order."""
    return sorted(folder.glob("responses-*.parquet"))


def read_responses(folder: Path, split: str | None = None) -> pl.DataFrame:
    """All answers in a folder, in the order of their shards.

    Args:
        split: "train" or "test"; None takes both.

    Raises:
        InputError: no shards, or one that cannot be read; the message names it.
    """
    paths = shard_paths(folder)
    if not paths:
        raise InputError(f"{folder}: no responses; run `specbench drafter generate` first")
    frames = [_read_shard(path) for path in paths]
    frame = pl.concat(frames)
    return frame if split is None else frame.filter(pl.col("split") == split)


def read_target(folder: Path) -> dict[str, object]:
    """The model that wrote the answers: ``model`` and ``fingerprint``.

    Raises:
        InputError: the file is missing or damaged.
    """
    path = folder / TARGET_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format_version"] > FORMAT_VERSION:
            raise InputError(f"{path}: written by a newer specbench; update specbench")
        return {"model": str(found["model"]), "fingerprint": str(found["fingerprint"])}
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"{path} is missing or damaged: choose another folder") from None


def _stream_shards(folder: Path, stream: str) -> list[Path]:
    # "a" must not take the shards of "a-b", as a glob would.
    pattern = re.compile(rf"responses-{re.escape(stream)}-\d+\.parquet")
    return [path for path in shard_paths(folder) if pattern.fullmatch(path.name)]


def _read_ledger(path: Path) -> tuple[set[str], int]:
    """Unusable prompts and loop tokens; nothing where there is no file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {str(name) for name in found["unusable_prompt_ids"]}, int(found["num_loop_tokens"])
    except FileNotFoundError:
        return set(), 0
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"{path} is damaged: remove it, prompts in it are tried again") from None


def _read_shard(path: Path) -> pl.DataFrame:
    try:
        return pl.read_parquet(path).select(list(SCHEMA)).cast(pl.Schema(SCHEMA))
    except (OSError, pl.exceptions.PolarsError):
        raise InputError(f"{path} cannot be read; remove it and generate again") from None


def _check_target(folder: Path, model: str, fingerprint: str) -> None:
    path = folder / TARGET_FILE
    if not path.exists():
        facts = {"format_version": FORMAT_VERSION, "model": model, "fingerprint": fingerprint}
        write_text_atomically(path, json.dumps(facts, indent=1) + "\n")
        return
    found = read_target(folder)
    if found["fingerprint"] != fingerprint:
        raise UsageError(
            f"{folder} holds answers of {found['model']}, not of {model}: choose another folder"
        )
