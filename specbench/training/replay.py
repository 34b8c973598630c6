"""Replay stored responses as speculative decoding would have produced them.

From the first emitted token on: draft a block, accept its leading tokens that equal the
response, add the bonus token, go on from there. At temperature 0 this is what the engine
does. It is so at higher temperatures too, for greedily drafted blocks: such a draft x is a
one-hot proposal, which rejection sampling accepts with probability p_target(x), and a
response sampled by the target contains x at that place with just this probability, given
what precedes. Comparing with a response that was sampled at temperature t therefore gives
acceptances distributed as the engine's at temperature t.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specbench.errors import UsageError
from specbench.training.feature_store import FeatureStore, TrainingBatch

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class DraftedBlocks:
    """Greedily drafted blocks, one row an anchor.

    Attributes:
        tokens: [N, L] ids in the target's vocabulary; column j - 1 drafts position a + j.
        confidence_logits: [N, L]; the sigmoid is the drafter's own estimate that the token is
            accepted given that those before it were. None without a confidence head.
        overlaps: [N, L] sum over the vocabulary of min(p, q), the acceptance of a *sampled*
            draft, or None.
    """

    tokens: Tensor
    confidence_logits: Tensor | None = None
    overlaps: Tensor | None = None


class GreedyDrafter(Protocol):
    """Whatever drafts blocks as the engine would, each token on the drafter's own last one."""

    def __call__(self, batch: TrainingBatch, anchors: Tensor, length: int) -> DraftedBlocks:
        """Draft ``length`` tokens after each anchor ([N] indices into the batch's tokens)."""


@dataclass(frozen=True)
class ReplaySteps:
    """The decode steps of a replay, n in all.

    Attributes:
        sequence_ids: [n] rows of the store's ``sequences``.
        num_accepted: [n] leading draft tokens that equal the response.
        num_labels: [n] draft tokens for which the response still had a token; below the block
            length only in a response's last steps, where ``num_accepted`` is cut short too.
        confidence_logits: [n, L] or None; see :class:`DraftedBlocks`.
        overlaps: [n, L] or None.
    """

    sequence_ids: IntArray
    num_accepted: IntArray
    num_labels: IntArray
    confidence_logits: FloatArray | None
    overlaps: FloatArray | None

    def __len__(self) -> int:
        return len(self.sequence_ids)

    def take(self, index: npt.NDArray[Any]) -> ReplaySteps:
        """The steps that a mask or an index array chooses."""
        return ReplaySteps(
            self.sequence_ids[index],
            self.num_accepted[index],
            self.num_labels[index],
            None if self.confidence_logits is None else self.confidence_logits[index],
            None if self.overlaps is None else self.overlaps[index],
        )


def replay(
    drafter: GreedyDrafter,
    store: FeatureStore,
    *,
    block_length: int,
    temperature: float,
    tokens_per_batch: int,
    progress: Progress | None = None,
) -> ReplaySteps:
    """Decode every stored response of one temperature again, with drafts of one length.

    All blocks of a batch are drafted at once; then each response is walked.

    Args:
        drafter: what is measured.
        store: responses and features.
        block_length: draft tokens a step, at least 1.
        temperature: which responses.
        tokens_per_batch: tokens drafted in one call.
        progress: called with (responses done, responses to do).

    Raises:
        UsageError: a block length below 1, or no response of this temperature.
    """
    if block_length < 1:
        raise UsageError(f"block length is {block_length}; give 1 or more")
    num_to_do = int((store.sequences["temperature"] == temperature).sum())
    if not num_to_do:
        found = ", ".join(f"{t:g}" for t in store.sequences["temperature"].unique().sort())
        raise UsageError(
            f"{store.folder}: no {store.split} responses sampled at temperature {temperature:g}; "
            f"there are some at {found}"
        )
    parts: list[ReplaySteps] = []
    num_done = 0
    for batch in store.evaluation_batches(
        tokens_per_batch=tokens_per_batch, block_length=block_length, temperature=temperature
    ):
        parts.append(replay_batch(drafter, batch, block_length))
        num_done += len(batch.sequence_ids)
        if progress is not None:
            progress(num_done, num_to_do)
    return _concatenate(parts)


def replay_batch(drafter: GreedyDrafter, batch: TrainingBatch, block_length: int) -> ReplaySteps:
    """Decode the responses of one batch again; its anchors must be all there are."""
    with torch.no_grad():
        drafts = drafter(batch, batch.anchors, block_length)
    rows = torch.searchsorted(batch.sequence_starts, batch.anchors, right=True) - 1
    room = batch.sequence_starts[1:][rows] - 1 - batch.anchors  # tokens after the anchor
    accepted = num_accepted(batch.token_ids, batch.anchors, room, drafts.tokens)
    visited = _visited(rows.numpy(), accepted.numpy())
    return ReplaySteps(
        sequence_ids=batch.sequence_ids[rows].numpy()[visited],
        num_accepted=accepted.numpy()[visited],
        num_labels=room.clamp(max=block_length).numpy()[visited],
        confidence_logits=_rows_of(drafts.confidence_logits, visited),
        overlaps=_rows_of(drafts.overlaps, visited),
    )


def num_accepted(token_ids: Tensor, anchors: Tensor, room: Tensor, drafts: Tensor) -> Tensor:
    """How many leading draft tokens equal the tokens that follow the anchor; [N] int64.

    Args:
        token_ids: [T].
        anchors: [N] indices into ``token_ids``.
        room: [N] tokens that follow each anchor in its sequence; none beyond are accepted.
        drafts: [N, L].
    """
    offsets = torch.arange(1, drafts.shape[1] + 1)
    positions = (anchors[:, None] + offsets).clamp(max=len(token_ids) - 1)
    equal = (token_ids[positions] == drafts.cpu()) & (offsets <= room[:, None])
    return equal.to(torch.int64).cumprod(dim=1).sum(dim=1)


def _visited(rows: IntArray, accepted: IntArray) -> IntArray:
    """Anchors at which a decode stops to draft, given all anchors of each sequence in order.

    An anchor that accepts k tokens is followed by the one k + 1 further on (the bonus token);
    a step beyond a sequence's last anchor has finished it.
    """
    first = np.flatnonzero(np.diff(rows, prepend=-1))
    last = np.append(first[1:], len(rows))
    visited: list[int] = []
    for anchor, end in zip(first.tolist(), last.tolist(), strict=True):
        while anchor < end:
            visited.append(anchor)
            anchor += int(accepted[anchor]) + 1
    return np.asarray(visited, dtype=np.int64)


def _rows_of(values: Tensor | None, index: IntArray) -> FloatArray | None:
    return None if values is None else values.detach().float().cpu().numpy()[index]


def _concatenate(parts: list[ReplaySteps]) -> ReplaySteps:
    def join(arrays: list[FloatArray | None]) -> FloatArray | None:
        present = [array for array in arrays if array is not None]
        return np.concatenate(present) if len(present) == len(parts) else None

    return ReplaySteps(
        np.concatenate([part.sequence_ids for part in parts]),
        np.concatenate([part.num_accepted for part in parts]),
        np.concatenate([part.num_labels for part in parts]),
        join([part.confidence_logits for part in parts]),
        join([part.overlaps for part in parts]),
    )
