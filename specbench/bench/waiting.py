"""Waiting for work that the user may stop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def run_unless_stopped(
    stop: asyncio.Event, work: Coroutine[Any, Any, T]
) -> tuple[bool, T | None]:
    """Run ``work``; when ``stop`` is set first, cancel it and wait for it to clean up.

    Returns:
        (True, its result) if it ended by itself, (False, None) if it was stopped.

    Raises:
        Whatever ``work`` raises before it is stopped.
    """
    task = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return True, task.result()
        return False, None
    finally:
        stopping.cancel()
        task.cancel()
        await asyncio.gather(task, stopping, return_exceptions=True)


async def run_all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run side by side; the first to raise cancels the others, which may clean up first."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
