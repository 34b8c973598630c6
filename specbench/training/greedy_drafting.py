"""Draft with a trained drafter the way the engine does at inference."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from specbench.training.drafter_model import DraftBatch, DSparkDrafter
from specbench.training.feature_store import TrainingBatch
from specbench.training.replay import DraftedBlocks

# Logits held at a time: 64 MB in float32.
LOGITS_PER_CHUNK = 1 << 24


class GreedyDSpark:
    """A :class:`specbench.training.replay.GreedyDrafter` around a DSpark drafter.

    The block is one parallel pass; then, position by position, the token with the largest
    logit is taken, where the transition bias comes from the drafter's own previous token (the
    anchor for the first). Training sees the true previous token there instead.
    """

    def __init__(
        self,
        drafter: DSparkDrafter,
        *,
        target_lm_head: Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Wrap ``drafter``.

        Args:
            drafter: on the CPU or a GPU; batches are moved to it.
            target_lm_head: [vocab, hidden]; if given, the overlap of target and drafter
                distribution at temperature 1 is computed as well, at about twice the cost.
            dtype: of the matrix products; bfloat16 is what the engine serves.
        """
        self._drafter = drafter
        self._dtype = dtype
        self._teacher_head: Tensor | None = None
        if target_lm_head is not None:
            ids = drafter.draft_token_ids
            self._teacher_head = target_lm_head.to(ids.device)[ids].to(dtype)

    @torch.no_grad()
    def __call__(self, batch: TrainingBatch, anchors: Tensor, length: int) -> DraftedBlocks:
        """Draft ``length`` tokens, at most the drafter's block size, after each anchor [N]."""
        device = self._drafter.embed_tokens.device
        token_ids = batch.token_ids.to(device).long()
        with torch.autocast(device.type, dtype=self._dtype, enabled=self._uses_autocast):
            output = self._drafter(
                DraftBatch(
                    token_ids=token_ids,
                    aux_hidden=batch.aux_hidden.to(device),
                    sequence_starts=batch.sequence_starts.to(device),
                    anchors=anchors.to(device),
                    block_lengths=torch.full_like(anchors, length).to(device),
                )
            )
            hidden = output.hidden.unflatten(0, (len(anchors), length))
            rows_per_chunk = max(1, LOGITS_PER_CHUNK // self._drafter.config.draft_vocab_size)
            parts = [
                self._draft_chunk(batch, anchors[i : i + rows_per_chunk], chunk, token_ids)
                for i, chunk in _chunks(hidden, rows_per_chunk)
            ]
        tokens, confidences, overlaps = (torch.cat(part).cpu() for part in zip(*parts, strict=True))
        return DraftedBlocks(tokens, confidences, None if self._teacher_head is None else overlaps)

    @property
    def _uses_autocast(self) -> bool:
        return self._dtype != torch.float32

    def _draft_chunk(
        self, batch: TrainingBatch, anchors: Tensor, hidden: Tensor, token_ids: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, confidence logits and overlaps [N, L] from hidden states [N, L, H]."""
        drafter = self._drafter
        previous = token_ids[anchors.to(token_ids.device)]
        columns: list[tuple[Tensor, Tensor, Tensor]] = []
        for offset in range(hidden.shape[1]):
            states = hidden[:, offset]
            logits = drafter.draft_logits(states, previous)
            confidence = drafter.confidence_logits(states, drafter.markov_embedding(previous))
            overlap = self._overlap(batch, anchors + offset, logits)
            previous = drafter.draft_token_ids[logits.float().argmax(dim=-1)]
            columns.append((previous, confidence.float(), overlap))
        tokens, confidences, overlaps = (torch.stack(c, dim=1) for c in zip(*columns, strict=True))
        return tokens, confidences, overlaps

    def _overlap(self, batch: TrainingBatch, rows: Tensor, logits: Tensor) -> Tensor:
        """Sum of min(p, q) over the draft vocabulary, [N]; p as told by the rows given.

        A row past the end of its sequence belongs to a cut step, whose overlap nobody reads.
        """
        if self._teacher_head is None:
            return logits.new_zeros(len(logits), dtype=torch.float32)
        rows = rows.clamp(max=len(batch.token_ids) - 1)
        states = batch.final_hidden[rows].to(logits.device, self._dtype)
        teacher = functional.linear(states, self._teacher_head).float()
        p = (teacher - batch.logsumexp[rows].to(logits.device)[:, None]).exp()
        return torch.minimum(p, logits.float().softmax(dim=-1)).sum(dim=-1)


def _chunks(values: Tensor, size: int) -> list[tuple[int, Tensor]]:
    return [(first, values[first : first + size]) for first in range(0, len(values), size)]
