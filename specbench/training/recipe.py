"""The steps of the training recipe, each from one folder of files to the next.

``workdir/responses`` holds the target's answers, ``workdir/features`` its hidden states,
``workdir/runs/<name>`` one training run each, with the drafter in ``drafter/`` and what it
was made of in ``run.json``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl

from specbench.engines.model_cache import resolve_drafter, resolve_model
from specbench.errors import UsageError
from specbench.training.drafter_checkpoint import load_drafter, save_drafter
from specbench.training.drafter_config import default_target_layer_ids
from specbench.training.evaluate import EvaluationReport, evaluate_drafter
from specbench.training.feature_store import FeatureStore
from specbench.training.features import extract_features
from specbench.training.greedy_drafting import GreedyDSpark
from specbench.training.near_duplicates import (
    distinct_indices,
    near_duplicates,
    without_shared_ends,
)
from specbench.training.responses import read_responses, read_target
from specbench.training.run_record import RunRecord, count_data, read_record, write_record
from specbench.training.starting_drafter import (
    NewDrafter,
    default_mask_token_id,
    starting_drafter,
)
from specbench.training.target_model import load_target
from specbench.training.trainer import Trainer, TrainSpec
from specbench.training.training_state import DRAFTER_FOLDER, only_trainer, read_state

# Mostly whole blocks, as a plain DSpark drafts them, with every shorter length in between:
# attention inside a block is not causal, so a drafter that never saw a short one drafts it
# worse than the same positions of a whole one.
DEFAULT_BLOCK_LENGTHS = (0.05, 0.05, 0.05, 0.1, 0.1, 0.05, 0.6)

OnProgress = Callable[[float, float], None]


def default_block_lengths(block_size: int) -> tuple[float, ...]:
    """Chances of lengths 1 .. block_size: DEFAULT_BLOCK_LENGTHS, or alike for other blocks."""
    if block_size == len(DEFAULT_BLOCK_LENGTHS):
        return DEFAULT_BLOCK_LENGTHS
    whole = DEFAULT_BLOCK_LENGTHS[-1]
    if block_size == 1:
        return (1.0,)
    return (*[(1.0 - whole) / (block_size - 1)] * (block_size - 1), whole)


def parse_probabilities(
    text: str | None, block_size: int = len(DEFAULT_BLOCK_LENGTHS)
) -> tuple[float, ...]:
    """Numbers separated by commas; None gives the default of a block size.

    Raises:
        UsageError: not numbers of at least 0 that sum to 1.
    """
    if text is None:
        return default_block_lengths(block_size)
    try:
        chances = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--block-lengths {text!r}: give numbers separated by commas") from None
    if min(chances) < 0 or not abs(sum(chances) - 1.0) < 1e-6:
        raise UsageError(f"--block-lengths {text!r}: give numbers of at least 0 that sum to 1")
    return chances


def extract(
    workdir: Path,
    *,
    model: str | None,
    device: str,
    layer_ids: Sequence[int] | None,
    splits: Sequence[str],
    max_tokens: int | None,
    on_progress: OnProgress,
) -> Iterator[str]:
    """Extract features split by split; yields a line about each.

    Near-duplicates are left out of the training split; see :func:`without_leaks`.

    Args:
        layer_ids: None takes :func:`default_target_layer_ids`.
        max_tokens: response tokens of each split to stop at, counted from the first shard.

    Raises:
        UsageError: the responses are another target's, or an unknown split.
    """
    if unknown := sorted(set(splits) - {"train", "test"}):
        raise UsageError(f"split {unknown[0]!r} is unknown; give train, test or both")
    responses = read_responses(workdir / "responses")
    _check_target(workdir, model)
    target = load_target(model, device=device)
    layers = list(layer_ids or default_target_layer_ids(target.num_layers))
    num_dropped = 0
    if "train" in splits:
        responses, num_dropped = without_leaks(responses)
    for split in splits:
        chosen = first_tokens(responses.filter(pl.col("split") == split), max_tokens)
        summary = extract_features(
            chosen,
            target,
            workdir / "features",
            layer_ids=layers,
            split=split,
            progress=on_progress,
        )
        dropped = f", {num_dropped:,} near-duplicates left out" if split == "train" else ""
        yield (
            f"{split}: {summary.num_sequences:,} responses added "
            f"({summary.num_tokens:,} tokens), {summary.num_already_stored:,} there before"
            f"{dropped}"
        )


def without_leaks(responses: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Drop training responses that are nearly others, or whose prompt is nearly a test prompt.

    Prompts of one source are compared without what the chat template and the source's own
    wording put around all of them. A source with test prompts only, such as an outside set,
    is compared with the training prompts of every source.

    Returns:
        What is left, in the order it came, and how many were dropped.
    """
    keep = np.ones(len(responses), dtype=np.bool_)
    is_train = (responses["split"] == "train").to_numpy()
    sources = responses["source"].to_numpy()
    trained_sources = set(sources[is_train].tolist())
    prompts = responses["prompt_token_ids"].to_list()
    for source in sorted(set(sources[~is_train].tolist())):
        compared = is_train & (sources == source) if source in trained_sources else is_train
        train = np.flatnonzero(compared & keep)
        test = np.flatnonzero(~is_train & (sources == source))
        groups = [[prompts[i] for i in train], [prompts[i] for i in test]]
        texts, references = without_shared_ends(*groups)
        keep[train[near_duplicates(texts, references)]] = False
    answers = responses["response_token_ids"].to_list()
    train = np.flatnonzero(is_train & keep)
    distinct = train[distinct_indices([answers[i] for i in train])]
    keep[np.setdiff1d(train, distinct)] = False
    return responses.filter(pl.Series(keep)), int((~keep).sum())


def first_tokens(responses: pl.DataFrame, max_tokens: int | None) -> pl.DataFrame:
    """The first responses that together hold at most so many response tokens."""
    if max_tokens is None:
        return responses
    return responses.filter(pl.col("response_token_ids").list.len().cum_sum() <= max_tokens)


def train_run(
    workdir: Path,
    run: str,
    spec: TrainSpec,
    *,
    shape: NewDrafter,
    start_from: Path | None,
    model: str | None,
    device: str,
    on_progress: OnProgress,
) -> Path:
    """Train under ``workdir/runs/<run>`` and export the drafter; returns its folder.

    Args:
        shape: of a new drafter; of one that is started from, only ``draft_vocab_size``
            counts, where given.

    Raises:
        InputError, UsageError: as the steps it is made of.
    """
    folder = run_folder(workdir, run)
    target = load_target(model, device=device)
    store = FeatureStore(workdir / "features", "train", target_fingerprint=target.fingerprint)
    if shape.mask_token_id is None and start_from is None:
        shape = replace(shape, mask_token_id=default_mask_token_id(model, target.vocab_size))
    with only_trainer(folder):
        saved = read_state(folder)
        # The vocabulary of a run stays what it was, however the features have grown since.
        ids = None if saved is None else saved.draft_token_ids
        drafter = starting_drafter(target, store, shape, start_from, spec.seed, ids)
        trainer = Trainer(drafter.to(target.device), store, target.lm_head_weight, spec, folder)
        if trainer.progress < 1.0 or read_record(folder) is None:
            record = RunRecord.of(start_from, count_data(workdir / "features"))
            write_record(folder, record)
        trainer.run(on_progress)
        save_drafter(folder / DRAFTER_FOLDER, drafter)
    return folder / DRAFTER_FOLDER


def run_folder(workdir: Path, run: str) -> Path:
    """Folder of a run; not created here.

    Raises:
        UsageError: the name would leave the folder of all runs.
    """
    if run in ("", ".", "..") or Path(run).name != run:
        raise UsageError(f"--run {run!r}: give a plain name; it becomes a folder")
    return workdir / "runs" / run


def evaluate_checkpoint(
    workdir: Path,
    drafter: str | None,
    *,
    split: str,
    temperatures: Sequence[float],
    block_length: int | None,
    model: str | None,
    device: str,
    on_progress: OnProgress,
) -> list[EvaluationReport]:
    """Evaluate a checkpoint on extracted features, once for each temperature.

    Args:
        temperatures: of the responses; none takes every one there is.
        block_length: None takes the drafter's block.

    Raises:
        UsageError: no drafter, features of another target or of other layers, or a block
            longer than the drafter's.
    """
    folder = drafter_folder(drafter, model)
    target = load_target(model, device=device)
    loaded = load_drafter(folder, target.embedding).to(target.device)
    store = FeatureStore(
        workdir / "features",
        split,
        target_fingerprint=target.fingerprint,
        target_layer_ids=loaded.config.target_layer_ids,
    )
    length = block_length or loaded.config.block_size
    if length > loaded.config.block_size:
        raise UsageError(
            f"--block-length {length}: the drafter's block is {loaded.config.block_size}"
        )
    greedy = GreedyDSpark(loaded.eval())
    chosen = temperatures or store.sequences["temperature"].unique().sort().to_list()
    return [
        evaluate_drafter(
            greedy,
            store,
            block_length=length,
            temperature=temperature,
            progress=on_progress,
        )
        for temperature in chosen
    ]


def drafter_folder(drafter: str | None, model: str | None) -> Path:
    """Folder of the checkpoint that ``--drafter`` and ``--model`` mean.

    Raises:
        InputError: no such folder.
        UsageError: no drafter, or one that is not on this machine.
    """
    reference = resolve_drafter(drafter, resolve_model(model))
    if reference is None:
        raise UsageError("name the drafter to evaluate with --drafter")
    folder = Path(reference.path_or_id)
    if not folder.is_dir():
        raise UsageError(f"--drafter {drafter}: no such folder; download the checkpoint first")
    return folder


def _check_target(workdir: Path, model: str | None) -> None:
    found, target = read_target(workdir / "responses"), resolve_model(model)
    if found["fingerprint"] != target.fingerprint:
        raise UsageError(
            f"the responses in {workdir} were written by {found['model']}; name it with --model"
        )
