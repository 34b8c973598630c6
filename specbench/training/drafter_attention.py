"""Attention of draft blocks: each block sees its context and all of itself.

The query rows of a block attend to the context positions before its anchor and to every
row of the block, with one softmax over both. Blocks are ragged. Nothing of size
[num_queries, num_queries] exists: blocks are grouped into tiles of neighbouring anchors of
one sequence, a tile multiplies against the context only as far as its last anchor reaches,
and the part inside blocks is a batch of [block, block] products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

# A tile's scores (3 key-value heads, 32 blocks of 7 rows for 3 query heads each, 400 keys)
# take 1.6 MB in bfloat16: they stay in a 2 MB level-2 cache between the passes over them.
BLOCKS_PER_TILE_CPU = 32
# A GPU wants few, large kernels instead.
BLOCKS_PER_TILE_CUDA = 512


@dataclass(frozen=True)
class AttentionTile:
    """Blocks of one sequence that are computed together.

    Attributes:
        rows: [num_blocks, width] int64, query row of every block position; 0 where padded.
        valid: [num_blocks, width] bool, false where padded.
        num_visible: [num_blocks] int64, context positions each block sees, counted from
            ``context_start``.
        min_visible: the smallest of them.
        context_start: flat index of the sequence's first token.
        context_stop: flat index after the last context position any block sees.
    """

    rows: torch.Tensor
    valid: torch.Tensor
    num_visible: torch.Tensor
    min_visible: int
    context_start: int
    context_stop: int

    def hidden_keys(self) -> torch.Tensor:
        """Keys no row of a block may see, [num_blocks, num_context - min_visible + width].

        The first ``min_visible`` context positions are left out: every block sees them.
        """
        stop = self.context_stop - self.context_start
        columns = torch.arange(self.min_visible, stop, device=self.rows.device)
        after_anchor = columns[None, :] >= self.num_visible[:, None]
        return torch.cat([after_anchor, ~self.valid], dim=1)


def plan_tiles(
    anchors: Sequence[int],
    block_lengths: Sequence[int],
    sequence_starts: Sequence[int],
    device: torch.device,
) -> list[AttentionTile]:
    """Group blocks into tiles.

    Args:
        anchors: flat index of each block's anchor token, [num_blocks], in any order.
        block_lengths: rows of each block, [num_blocks].
        sequence_starts: flat index of each sequence's first token and the total, ascending,
            [num_sequences + 1].
        device: where the tiles' tensors go.
    """
    first_rows = [0]
    for length in block_lengths:
        first_rows.append(first_rows[-1] + length)
    per_tile = BLOCKS_PER_TILE_CPU if device.type == "cpu" else BLOCKS_PER_TILE_CUDA
    tiles: list[AttentionTile] = []
    waiting: list[int] = []
    sequence = 0
    for block in sorted(range(len(anchors)), key=lambda b: anchors[b]):
        crossed = anchors[block] >= sequence_starts[sequence + 1]
        if waiting and (crossed or len(waiting) == per_tile):
            start = sequence_starts[sequence]
            tiles.append(_tile(waiting, anchors, block_lengths, first_rows, start, device))
            waiting = []
        while anchors[block] >= sequence_starts[sequence + 1]:
            sequence += 1
        waiting.append(block)
    if waiting:
        start = sequence_starts[sequence]
        tiles.append(_tile(waiting, anchors, block_lengths, first_rows, start, device))
    return tiles


def _tile(
    blocks: list[int],
    anchors: Sequence[int],
    block_lengths: Sequence[int],
    first_rows: list[int],
    start: int,
    device: torch.device,
) -> AttentionTile:
    """Tile of ``blocks`` (ascending anchors), all in the sequence that begins at ``start``."""
    lengths = torch.tensor([block_lengths[b] for b in blocks])
    firsts = torch.tensor([first_rows[b] for b in blocks])
    visible = torch.tensor([anchors[b] - start for b in blocks])
    columns = torch.arange(int(lengths.max()))
    valid = columns[None, :] < lengths[:, None]
    rows = torch.where(valid, firsts[:, None] + columns[None, :], 0)
    return AttentionTile(
        rows=rows.to(device),
        valid=valid.to(device),
        num_visible=visible.to(device),
        min_visible=int(visible[0]),
        context_start=start,
        context_stop=start + int(visible[-1]),
    )


def block_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    context_k: torch.Tensor,
    context_v: torch.Tensor,
    tiles: list[AttentionTile],
) -> torch.Tensor:
    """Attention output of every query row, [num_rows, num_heads, head_dim].

    softmax([q K_context^T, q K_block^T]) [V_context; V_block]; scores are in the dtype of
    ``q``, the softmax accumulates in float32.

    Args:
        q: [num_rows, num_heads, head_dim], already scaled by head_dim ** -0.5.
        k: keys of the query rows, [num_rows, num_kv_heads, head_dim].
        v: values of the query rows, same shape.
        context_k: keys of the context, [num_tokens, num_kv_heads, head_dim].
        context_v: values of the context, same shape.
        tiles: from :func:`plan_tiles`.
    """
    # torch does not annotate Function.apply.
    out: torch.Tensor = _BlockAttention.apply(  # type: ignore[no-untyped-call]
        q, k, v, context_k, context_v, tiles
    )
    return out


class _BlockAttention(torch.autograd.Function):
    """Written out so that the probabilities are the only large tensor kept for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        context_k: torch.Tensor,
        context_v: torch.Tensor,
        tiles: list[AttentionTile],
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        saved: list[torch.Tensor] = []
        with torch.autocast(q.device.type, enabled=False):
            for tile in tiles:
                view = _TileView(tile, q, k)
                span = slice(tile.context_start, tile.context_stop)
                context_p, block_p = view.probabilities(q, k, context_k[span])
                out_tile = torch.bmm(context_p, context_v[span].transpose(0, 1).contiguous())
                block_out = torch.bmm(view.per_block(block_p), view.keys(v))
                out_tile += block_out.view_as(out_tile)
                view.scatter(out_tile, out)
                saved += [context_p, block_p]
        ctx.tiles = tiles
        ctx.save_for_backward(q, k, v, context_k, context_v, out, *saved)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, context_k, context_v, out, *saved = ctx.saved_tensors
        grad_out = grads[0].to(q.dtype)
        delta = (grad_out * out).sum(dim=-1, keepdim=True)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        # Several tiles add to the same context rows: float32 keeps the small ones.
        wide = torch.promote_types(q.dtype, torch.float32)
        shape = (context_k.shape[1], context_k.shape[0], context_k.shape[2])
        grad_ck = context_k.new_zeros(shape, dtype=wide)
        grad_cv = context_v.new_zeros(shape, dtype=wide)
        with torch.autocast(q.device.type, enabled=False):
            for index, tile in enumerate(ctx.tiles):
                view = _TileView(tile, q, k)
                span = slice(tile.context_start, tile.context_stop)
                context_p, block_p = saved[2 * index], view.per_block(saved[2 * index + 1])
                qt, d_out, d_sum = view.queries(q), view.queries(grad_out), view.queries(delta)
                d_out = d_out * view.row_mask().to(q.dtype)
                d_sum = d_sum * view.row_mask().to(q.dtype)
                grad_cv[:, span] += torch.bmm(context_p.transpose(1, 2), d_out)
                d_scores = torch.bmm(d_out, context_v[span].permute(1, 2, 0).contiguous())
                d_scores.sub_(d_sum).mul_(context_p)
                grad_ck[:, span] += torch.bmm(d_scores.transpose(1, 2), qt)
                d_q = torch.bmm(d_scores, context_k[span].transpose(0, 1).contiguous())
                d_out_b, qt_b = view.per_block(d_out), view.per_block(qt)
                view.scatter_keys(torch.bmm(block_p.transpose(1, 2), d_out_b), grad_v)
                d_block = torch.bmm(d_out_b, view.keys(v).transpose(1, 2))
                d_block.sub_(view.per_block(d_sum)).mul_(block_p)
                view.scatter_keys(torch.bmm(d_block.transpose(1, 2), qt_b), grad_k)
                d_q += torch.bmm(d_block, view.keys(k)).view_as(d_q)
                view.scatter(d_q, grad_q)
        grad_ck = grad_ck.transpose(0, 1).to(context_k.dtype)
        return grad_q, grad_k, grad_v, grad_ck, grad_cv.transpose(0, 1).to(context_v.dtype), None


class _TileView:
    """Moves rows between the packed layout and the layout of one tile.

    In a tile, the rows of one key-value head are ordered (block, position, query head of the
    group), so that both [kv, rows, d] for the context and [kv * blocks, block rows, d] for
    the inside of blocks are plain views of one tensor.
    """

    def __init__(self, tile: AttentionTile, q: torch.Tensor, k: torch.Tensor) -> None:
        self.tile = tile
        self.num_kv = k.shape[1]
        self.group = q.shape[1] // k.shape[1]
        self.num_blocks, self.width = tile.rows.shape
        self.valid_rows = tile.rows[tile.valid]

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """[num_rows, num_heads, d] -> [kv, blocks * width * group, d]."""
        tiled = x[self.tile.rows].view(*self.tile.rows.shape, self.num_kv, self.group, -1)
        return tiled.permute(2, 0, 1, 3, 4).reshape(self.num_kv, -1, x.shape[-1])

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """[num_rows, num_kv_heads, d] -> [kv * blocks, width, d]."""
        return x[self.tile.rows].permute(2, 0, 1, 3).reshape(-1, self.width, x.shape[-1])

    def per_block(self, x: torch.Tensor) -> torch.Tensor:
        """[kv, blocks * width * group, c] -> [kv * blocks, width * group, c], a view."""
        return x.view(self.num_kv * self.num_blocks, self.width * self.group, x.shape[-1])

    def row_mask(self) -> torch.Tensor:
        """[1, blocks * width * group, 1] bool, false on padded rows."""
        return self.tile.valid.reshape(1, -1, 1).repeat_interleave(self.group, dim=1)

    def scatter(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Inverse of :meth:`queries` into ``out``; padded rows are dropped."""
        tiled = x.view(self.num_kv, self.num_blocks, self.width, self.group, -1)
        rows = tiled.permute(1, 2, 0, 3, 4).flatten(2, 3)
        out[self.valid_rows] = rows[self.tile.valid]

    def scatter_keys(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Inverse of :meth:`keys` into ``out``; padded rows are dropped."""
        rows = x.view(self.num_kv, self.num_blocks, self.width, -1).permute(1, 2, 0, 3)
        out[self.valid_rows] = rows[self.tile.valid]

    def probabilities(
        self, q: torch.Tensor, k: torch.Tensor, context_k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One softmax over context and block, given back as its two parts.

        Returns:
            [kv, rows, num_context] and [kv, rows, width], both contiguous.
        """
        queries = self.queries(q)
        num_context = context_k.shape[0]
        context = torch.bmm(queries, context_k.permute(1, 2, 0).contiguous())
        block = torch.bmm(self.per_block(queries), self.keys(k).transpose(1, 2))
        scores = torch.cat([context, block.view(self.num_kv, -1, self.width)], dim=-1)
        by_block = scores.view(self.num_kv, self.num_blocks, self.width * self.group, -1)
        hidden = self.tile.hidden_keys()[None, :, None, :]
        by_block[..., self.tile.min_visible :].masked_fill_(hidden, -torch.inf)
        p = torch.softmax(scores, dim=-1)
        return p[..., :num_context].contiguous(), p[..., num_context:].contiguous()
