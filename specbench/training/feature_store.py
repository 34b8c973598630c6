"""Read extracted features as batches: for training in random order, for evaluation in full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
import torch
from torch import Tensor

from specbench.errors import InputError, UsageError
from specbench.training.feature_shards import FeatureShard, read_index, shard_path

# Streams of random numbers that must not repeat each other for one seed.
_ORDER_STREAM, _ANCHOR_STREAM = 0, 1


@dataclass(frozen=True)
class TrainingBatch:
    """Several sequences one after the other, and the blocks to draft in them.

    T tokens, S sequences, N anchors. A block at anchor a predicts a + 1 .. a + block length;
    it may reach past the end of its sequence, where there is no label: a served drafter is
    not told that the end is near either, so the block keeps its length.

    Attributes:
        token_ids: [T] int32.
        aux_hidden: [T, F] bfloat16.
        final_hidden: [T, H] bfloat16.
        logsumexp: [T] float32, 0 in prompts.
        argmax: [T] int32, -1 in prompts.
        sequence_starts: [S + 1] int64.
        response_starts: [S] int64, indices into [T].
        anchors: [N] int64, indices into [T], ascending.
        block_lengths: [N] int64, at least 1.
        sequence_ids: [S] int64, rows of :attr:`FeatureStore.sequences`.
        sequence_sources: [S] int64, indices into :attr:`FeatureStore.sources`.
        temperatures: [S] float32, with which each response was sampled.
    """

    token_ids: Tensor
    aux_hidden: Tensor
    final_hidden: Tensor
    logsumexp: Tensor
    argmax: Tensor
    sequence_starts: Tensor
    response_starts: Tensor
    anchors: Tensor
    block_lengths: Tensor
    sequence_ids: Tensor
    sequence_sources: Tensor
    temperatures: Tensor


@dataclass(frozen=True)
class BatchPlan:
    """How training batches are drawn.

    Attributes:
        tokens_per_batch: a batch is closed before it would exceed this; a longer sequence
            gets a batch of its own.
        anchor_probability: chance of each anchor to be used, in (0, 1].
        block_length_probabilities: chance of a block to have length 1, 2, ...; they sum to 1.
        seed: same seed, same batches.
    """

    tokens_per_batch: int
    anchor_probability: float
    block_length_probabilities: tuple[float, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        chances = np.asarray(self.block_length_probabilities, dtype=np.float64)
        if self.tokens_per_batch < 1:
            raise UsageError(f"tokens per batch is {self.tokens_per_batch}; give 1 or more")
        if not 0 < self.anchor_probability <= 1:
            raise UsageError(
                f"anchor probability is {self.anchor_probability}; give a number above 0, at most 1"
            )
        if not (chances.size and (chances >= 0).all() and np.isclose(chances.sum(), 1.0)):
            raise UsageError(
                f"block length probabilities {list(self.block_length_probabilities)}: "
                "give numbers of at least 0 that sum to 1"
            )


class FeatureStore:
    """The features of one split in a folder, as far as their index goes.

    Attributes:
        folder, split: where they are.
        sequences: one row a sequence, in stored order; columns as
            :data:`specbench.training.feature_shards.INDEX_SCHEMA`.
        shards: the mapped files.
        sources: names of all sources, sorted.
        target_fingerprint: of the target they come from.
        target_layer_ids: layers behind ``aux_hidden``.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        *,
        target_fingerprint: str | None = None,
        target_layer_ids: Sequence[int] | None = None,
    ) -> None:
        """Open a split.

        Args:
            folder: what :func:`specbench.training.features.extract_features` wrote into.
            split: which part of it.
            target_fingerprint: if given, refuse features of another target.
            target_layer_ids: if given, refuse features of other layers.

        Raises:
            InputError: no features, a damaged shard, or shards that do not belong together.
            UsageError: features of another target or of other layers than asked for.
        """
        self.folder = folder
        self.split = split
        self.sequences = read_index(folder, split)
        if self.sequences.is_empty():
            raise InputError(f"{folder}: no {split} features; extract them first")
        num_shards = self.sequences["shard"].n_unique()
        self.shards = [FeatureShard(shard_path(folder, split, i)) for i in range(num_shards)]
        first = self.shards[0].metadata
        self.target_fingerprint = first.target_fingerprint
        self.target_layer_ids = first.target_layer_ids
        self.sources = sorted({name for s in self.shards for name in s.metadata.sources})
        self._check_shards()
        self._check_asked_for(target_fingerprint, target_layer_ids)

    @property
    def num_sequences(self) -> int:
        """Stored responses."""
        return self.sequences.height

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens."""
        return int(self.sequences["num_tokens"].sum())

    @property
    def num_response_tokens(self) -> int:
        """Response tokens."""
        return int(self.sequences["num_response_tokens"].sum())

    @property
    def num_anchors(self) -> int:
        """Positions from which a block can be drafted: all but the last of each response."""
        return self.num_response_tokens - self.num_sequences

    @cached_property
    def _lengths(self) -> npt.NDArray[np.int64]:
        """[num_sequences] tokens of each."""
        return self.sequences["num_tokens"].to_numpy().astype(np.int64)

    def num_batches(self, plan: BatchPlan, epoch: int) -> int:
        """Training steps in an epoch; may differ by a few between epochs."""
        return len(self._shuffled_groups(plan, epoch))

    def training_batches(
        self, plan: BatchPlan, epoch: int, first_step: int = 0
    ) -> Iterator[TrainingBatch]:
        """One epoch of batches from ``first_step`` on; every sequence comes once an epoch.

        Batch ``(plan, epoch, step)`` is always the same, whatever was drawn before, so that
        training can stop and go on. It is so as long as the store does not grow.
        """
        groups = self._shuffled_groups(plan, epoch)
        for step in range(first_step, len(groups)):
            rng = np.random.default_rng([plan.seed, _ANCHOR_STREAM, epoch, step])
            yield self._random_batch(plan, groups[step], rng)

    def evaluation_batches(
        self, *, tokens_per_batch: int, block_length: int, temperature: float | None = None
    ) -> Iterator[TrainingBatch]:
        """Every sequence once, in stored order, every anchor, blocks of one length.

        Args:
            tokens_per_batch: as in :class:`BatchPlan`.
            block_length: of every block.
            temperature: only responses sampled at this temperature; None takes all.
        """
        chosen = np.arange(self.num_sequences)
        if temperature is not None:
            chosen = chosen[self.sequences["temperature"].to_numpy() == temperature]
        for group in self._group(chosen, tokens_per_batch):
            batch = self._pack(group)
            yield replace(batch, block_lengths=torch.full_like(batch.anchors, block_length))

    def _random_batch(
        self, plan: BatchPlan, group: npt.NDArray[np.int64], rng: np.random.Generator
    ) -> TrainingBatch:
        batch = self._pack(group)
        num_anchors = batch.anchors.shape[0]
        chosen = rng.random(num_anchors) < plan.anchor_probability
        if not chosen.any():
            chosen[rng.integers(num_anchors)] = True
        chances = np.asarray(plan.block_length_probabilities)
        lengths = 1 + rng.choice(chances.size, size=chosen.sum(), p=chances / chances.sum())
        return replace(
            batch,
            anchors=batch.anchors[torch.from_numpy(chosen)],
            block_lengths=torch.from_numpy(lengths),
        )

    def _shuffled_groups(self, plan: BatchPlan, epoch: int) -> list[npt.NDArray[np.int64]]:
        rng = np.random.default_rng([plan.seed, _ORDER_STREAM, epoch])
        return self._group(rng.permutation(self.num_sequences), plan.tokens_per_batch)

    def _group(
        self, sequence_ids: npt.NDArray[np.int64], tokens_per_batch: int
    ) -> list[npt.NDArray[np.int64]]:
        """Cut an order of sequences into runs of at most so many tokens."""
        groups: list[list[int]] = []
        num_tokens = 0
        for sequence_id in sequence_ids.tolist():
            length = int(self._lengths[sequence_id])
            if not groups or num_tokens + length > tokens_per_batch:
                groups.append([])
                num_tokens = 0
            groups[-1].append(sequence_id)
            num_tokens += length
        return [np.asarray(group, dtype=np.int64) for group in groups]

    def _pack(self, sequence_ids: npt.NDArray[np.int64]) -> TrainingBatch:
        """Copy sequences out of their shards; with every anchor, as blocks of length 1."""
        places = self.sequences[sequence_ids.tolist()].select("shard", "position").iter_rows()
        stored = [_StoredSequence(self.shards[shard], position) for shard, position in places]
        ends = torch.tensor([item.end - item.start for item in stored]).cumsum(0)
        sequence_starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
        response_starts = sequence_starts[:-1] + torch.tensor(
            [item.response_start - item.start for item in stored]
        )
        bounds = zip(response_starts.tolist(), ends.tolist(), strict=True)
        anchors = torch.cat([torch.arange(first, end - 1) for first, end in bounds])
        return TrainingBatch(
            token_ids=torch.cat([item.rows(item.shard.token_ids) for item in stored]),
            aux_hidden=torch.cat([item.rows(item.shard.aux_hidden) for item in stored]),
            final_hidden=torch.cat([item.rows(item.shard.final_hidden) for item in stored]),
            logsumexp=torch.cat([item.rows(item.shard.logsumexp) for item in stored]),
            argmax=torch.cat([item.rows(item.shard.argmax) for item in stored]),
            sequence_starts=sequence_starts,
            response_starts=response_starts,
            anchors=anchors,
            block_lengths=torch.ones_like(anchors),
            sequence_ids=torch.from_numpy(sequence_ids),
            sequence_sources=torch.tensor([self.sources.index(item.source) for item in stored]),
            temperatures=torch.tensor([item.temperature for item in stored]),
        )

    def _check_shards(self) -> None:
        """All shards are of one origin and hold what the index says."""
        counts = self.sequences.group_by("shard").agg(pl.len(), pl.col("num_tokens").sum())
        listed = {shard: (rows, tokens) for shard, rows, tokens in counts.iter_rows()}
        origin = (self.target_fingerprint, self.target_layer_ids)
        for number, shard in enumerate(self.shards):
            metadata = shard.metadata
            if (metadata.target_fingerprint, metadata.target_layer_ids) != origin:
                raise InputError(
                    f"{shard.path} has another target or other layers than "
                    f"{self.shards[0].path.name} beside it; extract into an empty folder"
                )
            if listed.get(number) != (shard.num_sequences, shard.num_tokens):
                raise InputError(
                    f"{shard.path} does not hold what the {self.split} index lists; delete the "
                    "files of this split and extract the features again"
                )

    def _check_asked_for(
        self, fingerprint: str | None, target_layer_ids: Sequence[int] | None
    ) -> None:
        if fingerprint is not None and fingerprint != self.target_fingerprint:
            raise UsageError(
                f"{self.folder} holds features of another target "
                f"({self.target_fingerprint[:12]}, not {fingerprint[:12]}); name the target they "
                "were extracted from or extract them again"
            )
        if target_layer_ids is not None and tuple(target_layer_ids) != self.target_layer_ids:
            raise UsageError(
                f"{self.folder} holds features of target layers {list(self.target_layer_ids)}, "
                f"the drafter reads {list(target_layer_ids)}; extract them for these layers"
            )


class _StoredSequence:
    """Where one sequence lies in its shard."""

    def __init__(self, shard: FeatureShard, position: int) -> None:
        self.shard = shard
        self.start, self.end = shard.sequence_starts[position : position + 2].tolist()
        self.response_start = int(shard.response_starts[position])
        self.temperature = float(shard.temperatures[position])
        self.source = shard.metadata.sources[int(shard.sources[position])]

    def rows(self, tensor: Tensor) -> Tensor:
        """This sequence's part of a tensor over the shard's tokens; no copy."""
        return tensor[self.start : self.end]
