"""The DSpark drafter as a trainable module.

One pass over a packed batch: the target's hidden states become keys and values of the
context, and every draft block (its anchor token, then mask tokens) is read against them.
Block position j (from 0) sits at the sequence position anchor + j and predicts the token
after it. The numerics follow what vLLM's ``dspark`` method computes with the same tensors:
context states go through ``fc`` and ``hidden_norm`` and straight into the key and value
projections, keys are normalised per head before the rotary embedding, and attention inside
a block is not causal.

Weights are float32; under ``torch.autocast`` the products run in its dtype (bfloat16 in
training), while norms, rotary embedding and softmax accumulate in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from specbench.training.drafter_attention import AttentionTile, block_attention, plan_tiles
from specbench.training.drafter_config import DrafterConfig


@dataclass(frozen=True)
class DraftBatch:
    """Several sequences, packed, and the blocks to draft in them.

    Attributes:
        token_ids: [num_tokens] int, the sequences one after the other.
        aux_hidden: [num_tokens, feature_size], target features of every token.
        sequence_starts: [num_sequences + 1] int64, flat index of each sequence's first
            token, then ``num_tokens``.
        anchors: [num_blocks] int64, flat index of each block's anchor token.
        block_lengths: [num_blocks] int64, rows of each block, 1..block_size.
    """

    token_ids: torch.Tensor
    aux_hidden: torch.Tensor
    sequence_starts: torch.Tensor
    anchors: torch.Tensor
    block_lengths: torch.Tensor

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Block and position (from 0) of every query row, both [num_rows] int64."""
        num_blocks = self.anchors.shape[0]
        blocks = torch.arange(num_blocks, device=self.anchors.device)
        lengths = self.block_lengths.long()
        row_block = torch.repeat_interleave(blocks, lengths)
        firsts = torch.cumsum(lengths, 0) - lengths
        rows = torch.arange(row_block.shape[0], device=row_block.device)
        return row_block, rows - firsts[row_block]


@dataclass(frozen=True)
class RowTokens:
    """What each query row is conditioned on and should predict, all [num_rows] int64.

    Attributes:
        teacher_rows: flat index t whose final hidden state holds the target's distribution
            of the row's token; also the position of the previous token.
        previous_tokens: true token before the predicted one (teacher forcing).
        labels: true token, -1 where the sequence ends before it.
    """

    teacher_rows: torch.Tensor
    previous_tokens: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True)
class DraftOutput:
    """Result of one pass.

    Attributes:
        hidden: [num_rows, hidden_size], after the final norm; input of the heads.
        row_block: [num_rows] int64, block of each row.
        row_position: [num_rows] int64, position in its block, from 0.
    """

    hidden: torch.Tensor
    row_block: torch.Tensor
    row_position: torch.Tensor


def row_tokens(batch: DraftBatch, row_block: torch.Tensor, row_position: torch.Tensor) -> RowTokens:
    """Previous token, label and teacher of every row; rows past the end are clamped."""
    starts = batch.sequence_starts.long()
    sequence = torch.bucketize(batch.anchors.long(), starts, right=True) - 1
    last = starts[sequence + 1][row_block] - 1
    wanted = batch.anchors.long()[row_block] + row_position
    teacher_rows = torch.minimum(wanted, last)
    label_rows = torch.minimum(wanted + 1, last)
    tokens = batch.token_ids.long()
    labels = torch.where(wanted + 1 <= last, tokens[label_rows], -1)
    return RowTokens(teacher_rows, tokens[teacher_rows], labels)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, computed in float32 at least."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        """The result before it is rounded to the dtype of ``x``."""
        # torch does not annotate Function.apply.
        out: torch.Tensor = _RMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape and dtype as ``x``."""
        return self.wide(x).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """Written out because torch composes this norm of a dozen passes over memory on a CPU.

    With n = x r, r = (mean(x^2) + eps)^(-1/2) and upstream gradient g, the gradient in x is
    r (g w - n mean(g w n)), over the last axis, and that in w the sum of g n over the rows.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        inverse = (length.square() / x.shape[-1] + eps).rsqrt()
        ctx.save_for_backward(x, weight, inverse)
        return torch.mul(x, inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        normed = torch.mul(x, inverse)
        upstream = grads[0].to(normed.dtype)
        product = upstream * normed
        grad_weight = product.flatten(0, -2).sum(dim=0)
        # Not a matrix product: under autocast that would round the mean to bfloat16.
        mean = torch.linalg.vecdot(product, weight.to(product.dtype)).div_(x.shape[-1])
        grad_x = (
            torch.mul(upstream, weight).addcmul_(normed, mean[..., None], value=-1).mul_(inverse)
        )
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


@dataclass(frozen=True)
class Rotation:
    """Cosine and sine of the rotary angles, both [num_rows, 1, head_dim / 2], float32."""

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def at(cls, positions: torch.Tensor, config: DrafterConfig) -> Rotation:
        """Angles position / theta ** (2 i / head_dim), i < head_dim / 2 (RoFormer, eq. 15)."""
        index = torch.arange(config.head_dim // 2, device=positions.device, dtype=torch.float32)
        frequency = config.rope_theta ** (-2.0 * index / config.head_dim)
        angle = positions[:, None].float() * frequency
        return cls(angle.cos()[:, None, :], angle.sin()[:, None, :])

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate the two halves of the last axis against each other; x [rows, heads, d]."""
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], dim=-1)


@dataclass(frozen=True)
class _Pass:
    """What all layers of one pass share."""

    context: torch.Tensor  # [num_tokens, hidden_size], after hidden_norm
    context_rotation: Rotation
    query_rotation: Rotation
    tiles: list[AttentionTile]


class _Attention(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, shared: _Pass) -> torch.Tensor:
        q = shared.query_rotation.apply(self.q_norm.wide(self._heads(self.q_proj(x))))
        out = block_attention(
            # Scaled before rounding: exact for any head size.
            (q * self.head_dim**-0.5).to(x.dtype),
            self._keys(x, shared.query_rotation),
            self._heads(self.v_proj(x)),
            self._keys(shared.context, shared.context_rotation),
            self._heads(self.v_proj(shared.context)),
            shared.tiles,
        )
        projected: torch.Tensor = self.o_proj(out.flatten(1))
        return projected

    def _keys(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        return rotation.apply(self.k_norm.wide(self._heads(self.k_proj(x)))).to(x.dtype)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], -1, self.head_dim)


class _MLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, shared: _Pass) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), shared)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _MarkovHead(nn.Module):
    """Rank-limited bias of a token on its successor; see :meth:`DSparkDrafter.draft_logits`."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)


class _ConfidenceHead(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + config.markov_rank, 1)


class DSparkDrafter(nn.Module):
    """Drafter whose ``state_dict`` carries exactly the tensors of a vLLM checkpoint.

    Args:
        config: sizes.
        target_embedding: [vocab_size, hidden_size], the target's token embedding; used
            frozen and not part of the checkpoint, as vLLM shares it from the target.
        draft_token_ids: [draft_vocab_size] int64, ascending: target id of each draft token.
    """

    embed_tokens: torch.Tensor
    d2t: torch.Tensor
    target_to_draft: torch.Tensor

    def __init__(
        self, config: DrafterConfig, target_embedding: torch.Tensor, draft_token_ids: torch.Tensor
    ) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.markov_head = _MarkovHead(config)
        self.confidence_head = _ConfidenceHead(config)
        if target_embedding.shape != (config.vocab_size, config.hidden_size):
            raise ValueError("target_embedding must be [vocab_size, hidden_size]")
        self.register_buffer("embed_tokens", target_embedding.detach(), persistent=False)
        self._register_vocabulary(draft_token_ids)

    def _register_vocabulary(self, draft_token_ids: torch.Tensor) -> None:
        config, ids = self.config, draft_token_ids.long()
        ascending = bool((ids[1:] > ids[:-1]).all())
        if ids.shape != (config.draft_vocab_size,) or not ascending:
            raise ValueError("draft_token_ids must be [draft_vocab_size], ascending")
        if int(ids[0]) < 0 or int(ids[-1]) >= config.vocab_size:
            raise ValueError("draft_token_ids must lie in the vocabulary")
        indices = torch.arange(config.draft_vocab_size, device=ids.device)
        # vLLM has no such parameter when the drafter knows the whole vocabulary.
        self.register_buffer("d2t", ids - indices, persistent=config.reduced_vocabulary)
        lookup = torch.full((config.vocab_size,), -1, dtype=torch.int64, device=ids.device)
        lookup[ids] = indices
        self.register_buffer("target_to_draft", lookup, persistent=False)

    @property
    def draft_token_ids(self) -> torch.Tensor:
        """Target id of every draft token, [draft_vocab_size] int64, ascending."""
        return self.d2t + torch.arange(self.d2t.shape[0], device=self.d2t.device)

    def forward(self, batch: DraftBatch) -> DraftOutput:
        """Hidden states of all rows of all blocks.

        Raises:
            ValueError: an anchor or a block length is out of range.
        """
        anchors, lengths, starts = _host_lists(batch, self.config)
        row_block, row_position = batch.rows()
        x, flat = self._query_inputs(batch, row_block, row_position)
        token_positions = _positions(torch.arange(batch.token_ids.shape[0], device=x.device), batch)
        shared = _Pass(
            context=self.hidden_norm(self.fc(batch.aux_hidden.to(x.dtype))),
            context_rotation=Rotation.at(token_positions, self.config),
            query_rotation=Rotation.at(flat, self.config),
            tiles=plan_tiles(anchors, lengths, starts, x.device),
        )
        for layer in self.layers:
            x = layer(x, shared)
        return DraftOutput(self.norm(x), row_block, row_position)

    def _query_inputs(
        self, batch: DraftBatch, row_block: torch.Tensor, row_position: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings [num_rows, hidden_size] and in-sequence positions [num_rows]."""
        anchor_tokens = batch.token_ids.long()[batch.anchors.long()]
        tokens = torch.where(row_position == 0, anchor_tokens[row_block], self.config.mask_token_id)
        embedded = F.embedding(tokens, self.embed_tokens).to(compute_dtype(self.fc.weight))
        anchor_positions = _positions(batch.anchors.long(), batch)
        return embedded, anchor_positions[row_block] + row_position

    def markov_embedding(self, previous_tokens: torch.Tensor) -> torch.Tensor:
        """First factor of the transition bias, [num_rows, markov_rank]."""
        embedded: torch.Tensor = self.markov_head.markov_w1(previous_tokens)
        return embedded

    def draft_logits(self, hidden: torch.Tensor, previous_tokens: torch.Tensor) -> torch.Tensor:
        """Logits over the draft vocabulary, [num_rows, draft_vocab_size].

        lm_head(hidden) + w2 w1[previous token]; ``previous_tokens`` [num_rows] are target ids.
        """
        markov = self.markov_embedding(previous_tokens).to(hidden.dtype)
        logits: torch.Tensor = self.lm_head(hidden) + self.markov_head.markov_w2(markov)
        return logits

    def confidence_logits(self, hidden: torch.Tensor, markov: torch.Tensor) -> torch.Tensor:
        """Logit of the acceptance probability of each row's token, [num_rows], float32.

        A linear function of (hidden, markov embedding of the previous token), in float32 as
        vLLM keeps this head.
        """
        weight, bias = self.confidence_head.proj.weight, self.confidence_head.proj.bias
        with torch.autocast(hidden.device.type, enabled=False):
            # The head's input as vLLM sees it: both parts rounded to the working dtype.
            features = torch.cat([hidden, markov.to(hidden.dtype)], dim=-1).to(weight.dtype)
            return F.linear(features, weight, bias).squeeze(-1)


def compute_dtype(weight: torch.Tensor) -> torch.dtype:
    """Dtype of matrix products on the weight's device: autocast's, else the weight's own."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def _positions(flat: torch.Tensor, batch: DraftBatch) -> torch.Tensor:
    """Position in its sequence of each flat index."""
    starts = batch.sequence_starts.long()
    return flat - starts[torch.bucketize(flat, starts, right=True) - 1]


def _host_lists(batch: DraftBatch, config: DrafterConfig) -> tuple[list[int], list[int], list[int]]:
    """Anchors, lengths and starts as checked lists: they shape the computation."""
    anchors, lengths = batch.anchors.tolist(), batch.block_lengths.tolist()
    starts = batch.sequence_starts.tolist()
    num_tokens = batch.token_ids.shape[0]
    if starts[0] != 0 or starts[-1] != num_tokens or starts != sorted(starts):
        raise ValueError("sequence_starts must rise from 0 to the number of tokens")
    if not anchors or len(anchors) != len(lengths):
        raise ValueError("a batch needs at least one block, and one length for each")
    if min(anchors) < 0 or max(anchors) >= num_tokens:
        raise ValueError("an anchor lies outside the tokens")
    if min(lengths) < 1 or max(lengths) > config.block_size:
        raise ValueError(f"block lengths must lie in 1..{config.block_size}")
    if batch.aux_hidden.shape != (num_tokens, config.feature_size):
        raise ValueError(f"aux_hidden must be [num_tokens, {config.feature_size}]")
    return anchors, lengths, starts
