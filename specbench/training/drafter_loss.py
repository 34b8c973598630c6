"""The drafter's training loss: imitate the target, and know when that failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from specbench.training.drafter_model import DSparkDrafter, RowTokens
from specbench.training.drafter_vocabulary_loss import (
    DEFAULT_CHUNK_ROWS,
    VocabularyRows,
    VocabularyTargets,
    VocabularyWeights,
    vocabulary_loss,
)


@dataclass(frozen=True)
class LossWeights:
    """Weights of the losses; the defaults are those the embedded drafter was trained with.

    Attributes:
        cross_entropy: of the true token; rows whose token is no draft token are ignored.
        total_variation: 1 - sum of min(p, q).
        kl: divergence from the teacher inside the draft vocabulary.
        confidence: binary cross entropy of the confidence head.
        confidence_target: what the confidence predicts. ``greedy``: whether the drafter's
            most probable token is the target's; ``sampled``: sum of min(p, q), the
            probability that sampling accepts.
    """

    cross_entropy: float = 0.1
    total_variation: float = 0.9
    kl: float = 0.0
    confidence: float = 1.0
    confidence_target: Literal["greedy", "sampled"] = "greedy"


@dataclass(frozen=True)
class Teacher:
    """The target's predictions of the rows' tokens.

    Attributes:
        hidden: [num_rows, target_hidden_size], after the target's final norm.
        draft_head: [draft_vocab_size, target_hidden_size], lm_head rows of the draft tokens.
        logsumexp: [num_rows], of the logits over the whole vocabulary.
        argmax: [num_rows] int64, the target's most probable token (target id).
    """

    hidden: torch.Tensor
    draft_head: torch.Tensor
    logsumexp: torch.Tensor
    argmax: torch.Tensor


@dataclass(frozen=True)
class RowDiagnostics:
    """What each row did, all [num_rows], without gradient.

    Attributes:
        draft_tokens: int64, target id of the most probable draft token.
        draft_prob: its probability under the drafter.
        overlap: sum of min(p, q), the acceptance probability when sampling.
        confidence: acceptance probability the confidence head predicts.
        accepted_greedy: bool, whether ``draft_tokens`` is the target's most probable token.
    """

    draft_tokens: torch.Tensor
    draft_prob: torch.Tensor
    overlap: torch.Tensor
    confidence: torch.Tensor
    accepted_greedy: torch.Tensor


@dataclass(frozen=True)
class DraftLoss:
    """Weighted means over rows; only ``total`` carries a gradient.

    Attributes:
        total: scalar, weighted sum of the four losses.
        cross_entropy: scalar; its mean runs over all rows, ignored ones counting as 0.
        total_variation: scalar.
        kl: scalar; 0 if its weight is 0.
        confidence: scalar.
        rows: per-row results.
    """

    total: torch.Tensor
    cross_entropy: torch.Tensor
    total_variation: torch.Tensor
    kl: torch.Tensor
    confidence: torch.Tensor
    rows: RowDiagnostics


def position_weights(row_position: torch.Tensor, valid: torch.Tensor, decay: float) -> torch.Tensor:
    """decay ** position, 0 where a row has no label; [num_rows] float32.

    Later positions count less because they are reached only if all earlier ones were
    accepted; ``row_position`` counts from 0, so the first position weighs 1.
    """
    powers = torch.pow(decay, row_position.float())
    return torch.where(valid, powers, 0.0)


def drafter_loss(
    drafter: DSparkDrafter,
    hidden: torch.Tensor,
    tokens: RowTokens,
    teacher: Teacher,
    row_weights: torch.Tensor,
    weights: LossWeights,
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
) -> DraftLoss:
    """Loss of one batch; see :mod:`specbench.training.drafter_vocabulary_loss` for formulas.

    Args:
        drafter: whose heads are used.
        hidden: [num_rows, hidden_size], from the drafter's forward pass.
        tokens: previous tokens and labels of the rows.
        teacher: the target's predictions.
        row_weights: [num_rows], 0 for rows to leave out; at least one is positive.
        weights: of the losses.
        chunk_rows: rows whose logits exist at a time.
    """
    markov = drafter.markov_embedding(tokens.previous_tokens)
    labels = tokens.labels
    draft_labels = torch.where(labels >= 0, drafter.target_to_draft[labels.clamp(min=0)], -1)
    targets = VocabularyTargets(
        teacher.hidden, teacher.draft_head, teacher.logsumexp, draft_labels, row_weights
    )
    loss_sum, rows = vocabulary_loss(
        hidden,
        markov,
        drafter.lm_head.weight,
        drafter.markov_head.markov_w2.weight,
        targets,
        VocabularyWeights(weights.cross_entropy, weights.total_variation, weights.kl),
        chunk_rows,
    )
    draft_tokens = drafter.draft_token_ids[rows.draft_ids]
    accepted = draft_tokens == teacher.argmax
    logits = drafter.confidence_logits(hidden, markov)
    target = accepted if weights.confidence_target == "greedy" else rows.overlap.clamp(0, 1)
    confidence = F.binary_cross_entropy_with_logits(
        logits, target.to(logits.dtype), reduction="none"
    )
    diagnostics = RowDiagnostics(
        draft_tokens, rows.draft_prob, rows.overlap, logits.detach().sigmoid(), accepted
    )
    return _means(loss_sum, rows, confidence, diagnostics, row_weights, weights)


def _means(
    loss_sum: torch.Tensor,
    rows: VocabularyRows,
    confidence: torch.Tensor,
    diagnostics: RowDiagnostics,
    row_weights: torch.Tensor,
    weights: LossWeights,
) -> DraftLoss:
    """Divide the row-weighted sums by the total weight."""
    share = row_weights / row_weights.sum()
    confidence_mean = (confidence * share).sum()
    return DraftLoss(
        total=loss_sum / row_weights.sum() + weights.confidence * confidence_mean,
        cross_entropy=(rows.cross_entropy * share).sum(),
        total_variation=(rows.total_variation * share).sum(),
        kl=(rows.kl * share).sum(),
        confidence=confidence_mean.detach(),
        rows=diagnostics,
    )
