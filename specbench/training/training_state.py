"""The files of a training run: its state, and its log."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from filelock import FileLock, Timeout

from specbench.cache import ensure_writable, write_text_atomically
from specbench.errors import EnvironmentProblem, InputError, UsageError

STATE_FILE = "state.pt"
LOG_FILE = "log.jsonl"
DRAFTER_FOLDER = "drafter"
# Weights and optimiser of the default drafter take 350 MB; asked for before training starts.
NEED_BYTES = 512 * 1024**2


@dataclass
class Place:
    """Where a run is.

    Attributes:
        epoch: passes finished.
        step_in_epoch: steps of the present pass.
        num_steps: all steps.
        num_rows: drafted positions seen, over all steps.
        trained_s: time in training steps.
    """

    epoch: int = 0
    step_in_epoch: int = 0
    num_steps: int = 0
    num_rows: int = 0
    trained_s: float = 0.0


@dataclass(frozen=True)
class SavedState:
    """Contents of a state file; see :class:`specbench.training.trainer.Trainer`."""

    spec: dict[str, Any]
    place: Place
    drafter: dict[str, torch.Tensor]
    optimizer: list[dict[str, Any]]

    @property
    def draft_token_ids(self) -> torch.Tensor | None:
        """[draft_vocab_size] target ids, ascending; None where all tokens can be drafted."""
        offsets = self.drafter.get("d2t")
        if offsets is None:
            return None
        return offsets.cpu() + torch.arange(offsets.shape[0])


def read_state(folder: Path, device: torch.device | str = "cpu") -> SavedState | None:
    """State of the run in ``folder``; None where none has been saved.

    Raises:
        InputError: the file is damaged.
    """
    path = folder / STATE_FILE
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location=device, weights_only=True)
        place = Place(**state["place"])
        return SavedState(dict(state["spec"]), place, dict(state["drafter"]), state["optimizer"])
    except Exception as problem:
        # torch.load raises whatever unpickling meets.
        reason = (str(problem).splitlines() or [type(problem).__name__])[0]
        raise InputError(
            f"{path} cannot be read ({reason}); delete the folder to train anew"
        ) from problem


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Replace the state file in one step.

    Raises:
        EnvironmentProblem: the disk is full or the folder cannot be written.
    """
    temporary = folder / f".{STATE_FILE}"
    try:
        torch.save(state, temporary)
        os.replace(temporary, folder / STATE_FILE)
    except (OSError, RuntimeError) as problem:
        # torch reports a full disk as a RuntimeError.
        temporary.unlink(missing_ok=True)
        reason = (str(problem).splitlines() or ["unknown reason"])[0]
        raise EnvironmentProblem(
            f"cannot write {folder / STATE_FILE} ({reason}); make room and run the same "
            "command again"
        ) from problem


@contextmanager
def only_trainer(folder: Path) -> Iterator[None]:
    """Create a run folder and keep other processes from training in it.

    Raises:
        EnvironmentProblem: it cannot be written or has too little room.
        UsageError: another process trains there.
    """
    ensure_writable(folder, NEED_BYTES)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UsageError(
            f"{folder}: another process is training here; wait for it to end or choose "
            "another --run"
        ) from None
    try:
        yield
    finally:
        lock.release()


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Lines of a run's log, oldest first; a line that a crash cut off is left out."""
    path = folder / LOG_FILE
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(dict(json.loads(text)))
        except (ValueError, TypeError):
            continue
    return lines


def append_log(folder: Path, line: dict[str, Any]) -> None:
    """Add one line to a run's log."""
    with (folder / LOG_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def cut_log(folder: Path, num_steps: int) -> None:
    """Drop lines about steps that were lost in a crash and will be made again."""
    lines = read_log(folder)
    kept = [line for line in lines if line.get("step", 0) <= num_steps]
    if len(kept) < len(lines):
        write_text_atomically(folder / LOG_FILE, "".join(json.dumps(x) + "\n" for x in kept))


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait until the context is left, so that weights are never half moved."""
    if threading.current_thread() is not threading.main_thread():
        # Python delivers signals to the main thread only.
        yield
        return
    pressed: list[int] = []

    def remember(signum: int, frame: FrameType | None) -> None:
        pressed.append(signum)

    previous = signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if pressed:
        raise KeyboardInterrupt
