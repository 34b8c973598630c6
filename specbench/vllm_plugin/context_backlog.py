"""Contexts that the drafter has not stored yet, because nothing was drafted since.

Storing keys and values costs a share of every step (the drafter's context layers beside the
whole target, 1.6% for the embedded models). While nothing is drafted, what they are made of
is kept instead, and stored when a draft needs it. Requests that end before never cost it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

# Memory that a backlog may take: 23,000 tokens of the embedded target.
MAX_BYTES = 128 * 1024**2


class ContextRows(NamedTuple):
    """Tokens whose contexts are to be stored.

    Attributes:
        features: [num_tokens, num_features] of the target, in memory of their own.
        positions: [num_tokens] in their requests.
        slots: [num_groups, num_tokens] where keys and values go; padding is not stored.
        owners: [num_tokens] request slot of each.
    """

    features: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    owners: torch.Tensor

    def take(self, index: torch.Tensor) -> ContextRows:
        """Some of the rows."""
        return ContextRows(
            self.features[index], self.positions[index], self.slots[:, index], self.owners[index]
        )


class ContextBacklog:
    """Rows of past steps in order of time.

    Args:
        max_num_reqs: request slots.
        padding: slot that stands for nowhere.
        device: where the rows are.
    """

    def __init__(self, max_num_reqs: int, padding: int, device: torch.device) -> None:
        self._padding = padding
        # Counts the requests that had each slot: rows of one that left it are of no use.
        self._tenancy = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        self._chunks: list[tuple[ContextRows, torch.Tensor]] = []
        self._num_bytes = 0
        self.num_tokens = 0

    @property
    def is_full(self) -> bool:
        """Whether it takes more memory than it may."""
        return self._num_bytes > MAX_BYTES

    def forget(self, slot: int) -> None:
        """A new request in this slot."""
        self._tenancy[slot] += 1

    def add(self, rows: ContextRows) -> None:
        """Keep the rows of a step: their features as they are, of the rest a copy."""
        kept = ContextRows(rows.features, *(tensor.clone() for tensor in rows[1:]))
        self._chunks.append((kept, self._tenancy[kept.owners]))
        self._num_bytes += kept.features.nbytes
        self.num_tokens += kept.positions.shape[0]

    def drop_ended(self) -> None:
        """Drop rows of requests that have left their slots, and those that go nowhere."""
        kept = []
        for rows, tenancy in self._chunks:
            is_current = self._tenancy[rows.owners] == tenancy
            is_stored = (rows.slots != self._padding).any(dim=0)
            index = torch.nonzero(is_current & is_stored).flatten()
            if len(index):
                kept.append((rows.take(index), tenancy[index]))
        self._chunks = kept
        self._num_bytes = sum(rows.features.nbytes for rows, _ in kept)
        self.num_tokens = sum(rows.positions.shape[0] for rows, _ in kept)

    def take(self, max_tokens: int) -> Iterator[ContextRows]:
        """All that is worth storing, at most so many tokens at a time, and forget it.

        In order of time. A cache slot that a chunk names twice, because another request got
        the block, goes to the later one.
        """
        self.drop_ended()
        chunks = [rows for rows, _ in self._chunks]
        self._chunks, self._num_bytes, self.num_tokens = [], 0, 0
        if not chunks:
            return
        whole = ContextRows(
            torch.cat([rows.features for rows in chunks]),
            torch.cat([rows.positions for rows in chunks]),
            torch.cat([rows.slots for rows in chunks], dim=1),
            torch.cat([rows.owners for rows in chunks]),
        )
        for start in range(0, whole.positions.shape[0], max_tokens):
            part = slice(start, start + max_tokens)
            slots = torch.stack([self._last_only(group) for group in whole.slots[:, part]])
            yield ContextRows(
                whole.features[part], whole.positions[part], slots, whole.owners[part]
            )

    def _last_only(self, slots: torch.Tensor) -> torch.Tensor:
        """Padding in place of all but the last of equal slots."""
        ordered, index = torch.sort(slots, stable=True)
        is_repeated = torch.nn.functional.pad(ordered[:-1] == ordered[1:], (0, 1))
        return slots.scatter(0, index, ordered.masked_fill(is_repeated, self._padding))
