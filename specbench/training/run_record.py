"""What a training run was made of, in ``run.json`` beside its state."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl

from specbench.cache import write_text_atomically
from specbench.engines.model_cache import fingerprint_folder
from specbench.errors import InputError
from specbench.training.feature_shards import indexed_splits, read_index

RECORD_FILE = "run.json"
FORMAT_VERSION = 1

DataCounts = dict[str, dict[str, dict[str, int]]]


@dataclass(frozen=True)
class RunRecord:
    """One run's origins.

    Attributes:
        started_from: name and fingerprint of the drafter it started from; None for a new one.
        data: counts by split and source; see :func:`count_data`.
    """

    started_from: dict[str, str] | None
    data: DataCounts

    @classmethod
    def of(cls, start_from: Path | None, data: DataCounts) -> RunRecord:
        """A record of a run that starts from a checkpoint folder, or from nothing."""
        origin = None
        if start_from is not None:
            folder = start_from.resolve()
            origin = {"name": folder.name, "fingerprint": fingerprint_folder(folder)}
        return cls(origin, data)


def count_data(features: Path) -> DataCounts:
    """Responses, their tokens and their prompts' tokens in a feature folder.

    Returns:
        split -> source (``all`` for the sum) -> num_responses, num_prompt_tokens,
        num_response_tokens.
    """
    counts: DataCounts = {}
    for split in indexed_splits(features):
        index = read_index(features, split)
        summed = index.group_by("source").agg(
            pl.len().alias("num_responses"),
            (pl.col("num_tokens") - pl.col("num_response_tokens")).sum().alias("num_prompt_tokens"),
            pl.col("num_response_tokens").sum(),
        )
        rows = sorted(summed.iter_rows(named=True), key=lambda row: str(row["source"]))
        by_source = {
            str(row["source"]): {name: int(row[name]) for name in row if name != "source"}
            for row in rows
        }
        names = ("num_responses", "num_prompt_tokens", "num_response_tokens")
        total = {name: sum(row[name] for row in by_source.values()) for name in names}
        counts[split] = {"all": total, **by_source}
    return counts


def write_record(folder: Path, record: RunRecord) -> None:
    """Write a run's record; raises EnvironmentProblem."""
    facts = {"format_version": FORMAT_VERSION, **asdict(record)}
    write_text_atomically(folder / RECORD_FILE, json.dumps(facts, indent=1) + "\n")


def read_record(folder: Path) -> RunRecord | None:
    """A run's record; None where there is none.

    Raises:
        InputError: it is damaged.
    """
    path = folder / RECORD_FILE
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return RunRecord(found["started_from"], dict(found["data"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"{path} is damaged: remove it and repeat the train command") from None
