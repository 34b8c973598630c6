"""Losses over the draft vocabulary, with their gradient, in one pass over the logits.

For a row with teacher probabilities p (over the whole vocabulary; P = mass of p inside the
draft vocabulary D), draft probabilities q = softmax(z) over D and true token y:

=================  ===========================================  ==========================
loss               value                                        gradient in z
=================  ===========================================  ==========================
cross entropy      -log q_y, 0 where y is outside D             q - onehot(y)
total variation    1 - sum_D min(p, q)                          q (sum_D q s - s),
                                                                s_v = 1 where q_v < p_v
KL                 sum_D p log(p / q) - P log P                 P q - p
=================  ===========================================  ==========================

sum_D min(p, q) is the probability that speculative sampling accepts the row's token
(Leviathan et al. 2023, section 3.2); the total variation here is that distance between p
and q, tokens outside D counted as mass the drafter cannot reach. The KL is P times the
divergence of q from p renormalised on D: never negative, 0 where q is that distribution.

Logits of a chunk of rows exist at a time, never those of all rows. Matrix products run on
whole chunks in the working dtype (their cost is reading the weights); the element-wise part
runs in float32 on tiles small enough to stay in cache between its passes, since memory, not
arithmetic, is what a vocabulary-sized softmax waits for on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# Elements of one element-wise tile on a CPU: 0.4 MB a float32 buffer, four of which fit the
# 1-2 MB level-2 cache of current server cores.
TILE_ELEMENTS_CPU = 98_304
# Rows whose logits exist together: with 12,288 draft tokens in bfloat16 25 MB per matrix,
# and enough rows for a product to be bound by arithmetic rather than by reading the weights.
DEFAULT_CHUNK_ROWS = 1024
# Smallest positive normal float32: keeps logarithms of vanished probabilities finite.
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class VocabularyWeights:
    """Weights of the three losses."""

    cross_entropy: float
    total_variation: float
    kl: float


@dataclass(frozen=True)
class VocabularyTargets:
    """What the rows are compared with.

    Attributes:
        teacher_hidden: [num_rows, target_hidden_size], the target's final hidden states.
        teacher_head: [draft_vocab_size, target_hidden_size], the target's lm_head rows of
            the draft tokens.
        teacher_logsumexp: [num_rows], logsumexp of the target's logits over its whole
            vocabulary.
        labels: [num_rows] int64, draft id of the true token, -1 if it has none.
        row_weights: [num_rows] float, not negative.
    """

    teacher_hidden: torch.Tensor
    teacher_head: torch.Tensor
    teacher_logsumexp: torch.Tensor
    labels: torch.Tensor
    row_weights: torch.Tensor


@dataclass(frozen=True)
class VocabularyRows:
    """Per-row results, all [num_rows], without gradient.

    Attributes:
        cross_entropy: 0 where the label has no draft id.
        total_variation: 1 - overlap.
        kl: 0 throughout where the weight of this loss is 0 (it is then not computed).
        draft_ids: int64, draft id of the most probable token.
        draft_prob: its probability.
        overlap: sum of min(p, q).
    """

    cross_entropy: torch.Tensor
    total_variation: torch.Tensor
    kl: torch.Tensor
    draft_ids: torch.Tensor
    draft_prob: torch.Tensor
    overlap: torch.Tensor


def vocabulary_loss(
    hidden: torch.Tensor,
    markov: torch.Tensor,
    lm_head: torch.Tensor,
    markov_w2: torch.Tensor,
    targets: VocabularyTargets,
    weights: VocabularyWeights,
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
) -> tuple[torch.Tensor, VocabularyRows]:
    """Row-weighted sum of the weighted losses, differentiable, and the per-row parts.

    Logits are hidden @ lm_head^T + markov @ markov_w2^T. Products run in autocast's dtype
    where it is on, else in that of ``hidden``.

    Args:
        hidden: [num_rows, hidden_size].
        markov: [num_rows, markov_rank], embedding of the previous token.
        lm_head: [draft_vocab_size, hidden_size].
        markov_w2: [draft_vocab_size, markov_rank].
        targets: teacher, labels and row weights.
        weights: weights of the three losses.
        chunk_rows: rows whose logits exist at a time.
    """
    # torch does not annotate Function.apply.
    loss, *rows = _VocabularyLoss.apply(  # type: ignore[no-untyped-call]
        hidden, markov, lm_head, markov_w2, targets, weights, chunk_rows
    )
    return loss, VocabularyRows(*rows)


class _VocabularyLoss(torch.autograd.Function):
    """Gradients are formed in forward, while the logits exist, and scaled in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        markov: torch.Tensor,
        lm_head: torch.Tensor,
        markov_w2: torch.Tensor,
        targets: VocabularyTargets,
        weights: VocabularyWeights,
        chunk_rows: int,
    ) -> tuple[torch.Tensor, ...]:
        device = hidden.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
        with torch.autocast(device, enabled=False):
            # One product gives the biased logits: the two factors are laid side by side.
            inputs = torch.cat([hidden.to(dtype), markov.to(dtype)], dim=1)
            head = torch.cat([lm_head.to(dtype), markov_w2.to(dtype)], dim=1)
            work = _Work.prepare(inputs, head, targets, weights, any(ctx.needs_input_grad))
            for start in range(0, inputs.shape[0], chunk_rows):
                work.chunk(start, min(start + chunk_rows, inputs.shape[0]))
        split = hidden.shape[1]
        if work.grad_inputs is not None and work.grad_head is not None:
            grad_head = work.grad_head.t()
            ctx.save_for_backward(
                work.grad_inputs[:, :split].to(hidden.dtype),
                work.grad_inputs[:, split:].to(markov.dtype),
                grad_head[:, :split].to(lm_head.dtype),
                grad_head[:, split:].to(markov_w2.dtype),
            )
        rows = work.rows
        outputs = (
            rows.cross_entropy,
            rows.total_variation,
            rows.kl,
            rows.draft_ids,
            rows.draft_prob,
            rows.overlap,
        )
        ctx.mark_non_differentiable(*outputs)
        return (work.total(), *outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scale = grads[0]
        scaled = [saved * scale.to(saved.dtype) for saved in ctx.saved_tensors]
        return (*scaled, None, None, None)


@dataclass
class _Work:
    """State of one pass; ``grad_head`` is kept transposed, as its product is faster so."""

    inputs: torch.Tensor
    head: torch.Tensor
    teacher_head: torch.Tensor
    targets: VocabularyTargets
    weights: VocabularyWeights
    rows: VocabularyRows
    grad_inputs: torch.Tensor | None
    grad_head: torch.Tensor | None

    @classmethod
    def prepare(
        cls,
        inputs: torch.Tensor,
        head: torch.Tensor,
        targets: VocabularyTargets,
        weights: VocabularyWeights,
        with_gradient: bool,
    ) -> _Work:
        wide = torch.promote_types(inputs.dtype, torch.float32)
        num_rows = inputs.shape[0]
        floats = [torch.zeros(num_rows, dtype=wide, device=inputs.device) for _ in range(5)]
        ids = torch.zeros(num_rows, dtype=torch.int64, device=inputs.device)
        return cls(
            inputs=inputs,
            head=head,
            teacher_head=targets.teacher_head.to(inputs.dtype),
            targets=targets,
            weights=weights,
            rows=VocabularyRows(floats[0], floats[1], floats[2], ids, floats[3], floats[4]),
            grad_inputs=torch.empty_like(inputs) if with_gradient else None,
            grad_head=inputs.new_zeros(head.shape[::-1], dtype=wide) if with_gradient else None,
        )

    def total(self) -> torch.Tensor:
        """Row-weighted sum of the weighted losses, a scalar."""
        rows, weights = self.rows, self.weights
        per_row = (
            weights.cross_entropy * rows.cross_entropy
            + weights.total_variation * rows.total_variation
            + weights.kl * rows.kl
        )
        return (per_row * self.targets.row_weights.to(per_row.dtype)).sum()

    def chunk(self, start: int, stop: int) -> None:
        """Losses of rows start..stop-1, and their share of the gradients."""
        inputs = self.inputs[start:stop]
        logits = inputs @ self.head.t()
        teacher = self.targets.teacher_hidden[start:stop].to(inputs.dtype) @ self.teacher_head.t()
        step = stop - start
        if inputs.device.type == "cpu":
            step = max(1, TILE_ELEMENTS_CPU // self.head.shape[0])
        for first in range(0, stop - start, step):
            part = slice(first, min(first + step, stop - start))
            self._tile(logits[part], teacher[part], slice(start + part.start, start + part.stop))
        if self.grad_inputs is not None and self.grad_head is not None:
            # The logits have been overwritten by their gradient.
            torch.mm(logits, self.head, out=self.grad_inputs[start:stop])
            self.grad_head += inputs.t() @ logits

    def _tile(self, logits: torch.Tensor, teacher: torch.Tensor, at: slice) -> None:
        """Losses of one tile; ``logits`` become the gradient of the weighted sum in them."""
        rows, targets, weights = self.rows, self.targets, self.weights
        wide = rows.overlap.dtype
        teacher_log = teacher.to(wide).sub_(targets.teacher_logsumexp[at].to(wide)[:, None])
        p = teacher_log.exp() if weights.kl else teacher_log.exp_()
        z = logits.to(wide)
        z_max, rows.draft_ids[at] = z.max(dim=-1)
        z.sub_(z_max[:, None])
        q = z.exp()
        normaliser = q.sum(dim=-1)
        q.mul_(normaliser.reciprocal()[:, None])
        rows.draft_prob[at] = normaliser.reciprocal()
        labels = targets.labels[at]
        known = labels >= 0
        label_z = z.gather(1, labels.clamp(min=0)[:, None]).squeeze(1)
        rows.cross_entropy[at] = torch.where(known, normaliser.log() - label_z, 0)
        p_mass = p.sum(dim=-1)
        if weights.kl:
            log_ratio = teacher_log.sub_(z).mul_(p).sum(dim=-1) + p_mass * normaliser.log()
            rows.kl[at] = log_ratio - p_mass * p_mass.clamp(min=_TINY).log()
        rows.overlap[at] = torch.minimum(p, q, out=z).sum(dim=-1)
        rows.total_variation[at] = 1 - rows.overlap[at]
        if self.grad_inputs is not None:
            self._gradient(logits, p, q, z, p_mass, at)

    def _gradient(
        self,
        out: torch.Tensor,
        p: torch.Tensor,
        q: torch.Tensor,
        buffer: torch.Tensor,
        p_mass: torch.Tensor,
        at: slice,
    ) -> None:
        """Write the gradient of the row-weighted losses into ``out``; uses up all buffers."""
        weights, labels = self.weights, self.targets.labels[at]
        row_weight = self.targets.row_weights[at].to(p.dtype)
        known = (labels >= 0).to(p.dtype)
        # q s of the total variation: the part of q that lies below p.
        below = buffer.copy_(q).lt_(p).mul_(q)
        of_q = weights.cross_entropy * known + weights.kl * p_mass
        of_q = row_weight * (of_q + weights.total_variation * below.sum(dim=-1))
        grad = q.mul_(of_q[:, None])
        grad.addcmul_(below, (weights.total_variation * row_weight)[:, None], value=-1)
        if weights.kl:
            grad.addcmul_(p, (weights.kl * row_weight)[:, None], value=-1)
        at_label = -weights.cross_entropy * row_weight * known
        grad.scatter_add_(1, labels.clamp(min=0)[:, None], at_label[:, None])
        out.copy_(grad)
