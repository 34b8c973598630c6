"""Rows that live on the device and that the host reads now, or one step later."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class HostRows:
    """A float32 matrix by request slot, copied to the host every step without waiting.

    Args:
        fill: [num_columns] what a new request's row is.
        num_rows: request slots.
        device: where the rows are made.
        staleness: 0 reads what was published last, waiting for it; 1 what was published
            before that, which has arrived by then.
    """

    def __init__(
        self, fill: torch.Tensor, num_rows: int, device: torch.device, staleness: int
    ) -> None:
        self._fill = fill.detach().cpu().numpy().astype(np.float32)
        self._on_gpu = device.type == "cuda"
        shape = (num_rows, fill.shape[0])
        # The copy that is read and, with staleness, the one under way.
        self._copies = [
            torch.empty(shape, pin_memory=self._on_gpu, dtype=torch.float32)
            for _ in range(staleness + 1)
        ]
        for copy in self._copies:
            copy[:] = torch.from_numpy(self._fill)
        self._arrived: list[Any] = [None] * len(self._copies)
        self._new: list[set[int]] = [set() for _ in self._copies]

    def forget(self, slot: int) -> None:
        """A new request in this slot: copies made for the last one do not count for it."""
        for new in self._new:
            new.add(slot)

    def publish(self, rows: torch.Tensor) -> None:
        """Start copying this step's rows; the oldest copy makes room."""
        copy, _, new = self._copies.pop(0), self._arrived.pop(0), self._new.pop(0)
        new.clear()
        copy.copy_(rows, non_blocking=True)
        event: Any = None
        if self._on_gpu:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._copies.append(copy)
        self._arrived.append(event)
        self._new.append(new)

    def read(self, slots: np.ndarray) -> np.ndarray:
        """[num_slots, num_columns] float64 of these requests, from the oldest copy."""
        event, new = self._arrived[0], self._new[0]
        if event is not None:
            event.synchronize()
        rows: np.ndarray = self._copies[0].numpy()[slots].astype(np.float64)
        rows[[slot in new for slot in slots.tolist()]] = self._fill
        return rows
