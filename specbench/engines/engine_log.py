"""Send what the engine prints to a file, so that results own the terminal."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from specbench.errors import EnvironmentProblem


@contextlib.contextmanager
def output_to_file(log_file: Path, *, verbose: bool) -> Iterator[None]:
    """Inside the block, file descriptors 1 and 2 point at ``log_file``.

    Processes started inside keep the file for good; this process gets its own descriptors
    back at the end. With ``verbose`` nothing is redirected.

    Raises:
        EnvironmentProblem: the file cannot be opened.
    """
    if verbose:
        yield
        return
    try:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        target = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot write the engine log {log_file}: {error.strerror}; "
            "choose another with --log-file"
        ) from error
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    try:
        os.dup2(target, 1)
        os.dup2(target, 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, original in zip((1, 2), saved, strict=True):
            os.dup2(original, number)
            os.close(original)
        os.close(target)


def send_logger_to_file(name: str, log_file: Path) -> None:
    """Replace the handlers of a logger and its children by one that appends to a file."""
    logger = logging.getLogger(name)
    handler = logging.FileHandler(log_file, delay=True)
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [%(name)s] %(message)s"))
    logger.handlers = [handler]
    logger.propagate = False


# A traceback's last line, with or without the logger's prefix in front of it.
_CAUSE = re.compile(r"(?:^|\s)((?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception|Problem|Failure): .+)$")
# Lines by which one process only reports that another one failed.
_SECOND_HAND = ("Engine core initialization failed", "EngineCore encountered an issue",
                "WorkerProc initialization failed", "cancelled")  # fmt: skip


def log_size(log_file: Path) -> int:
    """Bytes in the log so far; what an earlier run wrote there is not this run's cause."""
    try:
        return log_file.stat().st_size
    except OSError:
        return 0


def last_error_line(log_file: Path, *, start: int = 0) -> str | None:
    """The log's last line that names a cause rather than a consequence; None without one.

    Args:
        start: byte from which the log belongs to this run.
    """
    try:
        with log_file.open("rb") as log:
            log.seek(start)
            lines = log.read().decode(errors="replace").splitlines()[-400:]
    except OSError:
        return None
    causes = [found.group(1) for line in lines if (found := _CAUSE.search(line))]
    # The front end's word for "the engine died", which the message says already.
    causes = [cause for cause in causes if "EngineDeadError" not in cause]
    first_hand = [cause for cause in causes if not any(text in cause for text in _SECOND_HAND)]
    chosen = (first_hand or causes)[-1:]
    return chosen[0].strip()[:300] if chosen else None
