"""An independent reading of the drafter: one block at a time, nothing packed, plain autograd."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from specbench.training.drafter_config import DrafterConfig
from specbench.training.drafter_initial import new_drafter
from specbench.training.drafter_model import DraftBatch, DSparkDrafter


def tiny_config(**changes: Any) -> DrafterConfig:
    sizes: dict[str, Any] = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_hidden_layers": 2,
        "vocab_size": 50,
        "draft_vocab_size": 20,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 256,
        "block_size": 5,
        "mask_token_id": 3,
        "target_layer_ids": (0, 2, 3),
        "num_target_layers": 6,
        "markov_rank": 4,
    }
    return DrafterConfig(**{**sizes, **changes})


def tiny_drafter(config: DrafterConfig | None = None, seed: int = 0) -> DSparkDrafter:
    """A drafter whose every weight matters: nothing is left at zero or one."""
    config = config or tiny_config()
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
    ids = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size]
    drafter = new_drafter(config, embedding, embedding, ids.sort().values, seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.3 * noise)
    return drafter


def tiny_batch(
    config: DrafterConfig,
    lengths: list[int],
    anchors: list[int],
    block_lengths: list[int],
    seed: int = 0,
) -> DraftBatch:
    """Random sequences of ``lengths`` tokens with blocks at flat ``anchors``."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return DraftBatch(
        torch.randint(0, config.vocab_size, (num_tokens,), generator=generator),
        torch.randn(num_tokens, config.feature_size, generator=generator),
        starts,
        torch.tensor(anchors),
        torch.tensor(block_lengths),
    )


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _rotate(x: torch.Tensor, positions: list[int], theta: float) -> torch.Tensor:
    """x [tokens, heads, d]; every pair (i, i + d/2) turned as a complex number."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:])
    for row, position in enumerate(positions):
        angles = torch.tensor([position / theta ** (i / half) for i in range(half)])
        turn = torch.polar(torch.ones(half, dtype=x.dtype), angles.to(x.dtype))
        turned = torch.cat([turned[:row], (turned[row] * turn)[None], turned[row + 1 :]])
    return torch.cat([turned.real, turned.imag], dim=-1)


def naive_block(
    drafter: DSparkDrafter, tokens: torch.Tensor, aux: torch.Tensor, anchor: int, length: int
) -> torch.Tensor:
    """Hidden states [length, hidden_size] of one block of one sequence."""
    config, weights = drafter.config, dict(drafter.named_parameters())
    eps, theta = config.rms_norm_eps, config.rope_theta
    ids = [int(tokens[anchor])] + [config.mask_token_id] * (length - 1)
    x = drafter.embed_tokens[torch.tensor(ids)].to(weights["fc.weight"].dtype)
    context = _norm(aux[:anchor] @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    positions = list(range(anchor + length))
    for index in range(config.num_hidden_layers):
        layer = {
            name.removeprefix(f"layers.{index}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"layers.{index}.")
        }
        normed = _norm(x, layer["input_layernorm.weight"], eps)

        def heads(inputs: torch.Tensor, kind: str, layer: Any = layer) -> torch.Tensor:
            out = inputs @ layer[f"self_attn.{kind}_proj.weight"].T
            return out.reshape(len(inputs), -1, config.head_dim)

        seen = torch.cat([context, normed])
        q = _norm(heads(normed, "q"), layer["self_attn.q_norm.weight"], eps)
        k = _norm(heads(seen, "k"), layer["self_attn.k_norm.weight"], eps)
        q, k = _rotate(q, positions[anchor:], theta), _rotate(k, positions, theta)
        group = config.num_attention_heads // config.num_key_value_heads
        k, v = (t.repeat_interleave(group, dim=1) for t in (k, heads(seen, "v")))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(config.head_dim)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        x = x + mixed.flatten(1) @ layer["self_attn.o_proj.weight"].T
        normed = _norm(x, layer["post_attention_layernorm.weight"], eps)
        gate = F.silu(normed @ layer["mlp.gate_proj.weight"].T)
        up = normed @ layer["mlp.up_proj.weight"].T
        x = x + (gate * up) @ layer["mlp.down_proj.weight"].T
    return _norm(x, weights["norm.weight"], eps)


def naive_forward(drafter: DSparkDrafter, batch: DraftBatch) -> torch.Tensor:
    """Hidden states of all blocks, one block after the other."""
    out = []
    starts = batch.sequence_starts.tolist()
    blocks = zip(batch.anchors.tolist(), batch.block_lengths.tolist(), strict=True)
    for anchor, length in blocks:
        first = max(start for start in starts[:-1] if start <= anchor)
        tokens, aux = batch.token_ids[first:], batch.aux_hidden[first:]
        out.append(naive_block(drafter, tokens, aux, anchor - first, length))
    return torch.cat(out)
