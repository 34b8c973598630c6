"""What a run tells whoever watches it. Watching must stay cheap: it shares the machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from specbench.records import RequestRecord, RoundRecord


@dataclass(frozen=True)
class EngineStarting:
    """The engine is being started; nothing is measured yet."""


@dataclass(frozen=True)
class EngineProfiled:
    """Step costs are being measured: shape ``done`` of ``total`` comes next."""

    shape: str
    done: int
    total: int


@dataclass(frozen=True)
class Notice:
    """Something the user should know about how the run is set up; nothing failed."""

    text: str


@dataclass(frozen=True)
class RoundStarted:
    """A policy begins its share of a round."""

    policy: str
    round_index: int
    warmup: bool
    num_requests: int


@dataclass(frozen=True)
class RequestDone:
    """A request finished, failed or was aborted."""

    request: RequestRecord


@dataclass(frozen=True)
class RoundDone:
    """A policy's share of a round is over."""

    record: RoundRecord


Event: TypeAlias = EngineStarting | EngineProfiled | Notice | RoundStarted | RequestDone | RoundDone
OnEvent: TypeAlias = Callable[[Event], None]


def ignore_event(event: Event) -> None:
    """Watch nothing."""
