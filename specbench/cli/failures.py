"""How a command ends when it cannot finish: one line on stderr and an exit code."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

from specbench import __version__
from specbench.cache import cache_dir
from specbench.environment import missing_package
from specbench.errors import Interrupted, SpecbenchError

DEBUG_ENV = "SPECBENCH_DEBUG"

EXIT_UNEXPECTED = 1
EXIT_INTERRUPTED = 130  # 128 + SIGINT, what a shell shows for Ctrl-C
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE, what a shell shows for a program cut off by `head`


def report_failure(error: BaseException) -> int:
    """Say on stderr in one line what went wrong; returns the exit code.

    Expected failures carry their own message and code. Anything else is a defect: its
    traceback goes to a file that the line names, or to stderr with ``SPECBENCH_DEBUG=1``.
    """
    if isinstance(error, BrokenPipeError):
        silence_stdout()
        return EXIT_BROKEN_PIPE
    if os.environ.get(DEBUG_ENV, "") not in ("", "0"):
        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        print_line("interrupted", style="yellow")
        return EXIT_INTERRUPTED
    if isinstance(error, ModuleNotFoundError):
        error = missing_package(error) or error
    if isinstance(error, Interrupted):
        print_line(f"interrupted: {error}", style="yellow")
        return error.exit_code
    if isinstance(error, SpecbenchError):
        print_line(f"error: {error}", style="red")
        return error.exit_code
    print_line(f"error: {_describe_unexpected(error)}", style="red")
    return EXIT_UNEXPECTED


def print_line(message: str, *, style: str) -> None:
    """Print one line on stderr, coloured where stderr is a terminal that wants colour."""
    from rich.console import Console
    from rich.text import Text

    text = Text(" ".join(message.split()), style=style)
    Console(stderr=True, highlight=False).print(text, soft_wrap=True)


def silence_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush cannot fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _describe_unexpected(error: BaseException) -> str:
    detail = str(error).strip().splitlines()
    name = type(error).__name__ + (f": {detail[0]}" if detail else "")
    log_file = _write_crash_log(error)
    where = f"traceback in {log_file}" if log_file else f"{DEBUG_ENV}=1 shows the traceback"
    return f"unexpected {name}; this is a defect in specbench, please report it ({where})"


def _write_crash_log(error: BaseException) -> Path | None:
    """Write the traceback into the cache, or where that fails into the temporary directory."""
    name = f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    text = "".join(traceback.format_exception(error))
    # Option values stay out of the file: they may hold credentials, and it is made to be sent.
    words = [word.partition("=")[0] for word in sys.argv[1:] if word.startswith("-")]
    header = f"specbench {__version__}, Python {sys.version}\noptions: {' '.join(words)}\n\n"
    for folder in _log_folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(header + text, encoding="utf-8")
        except OSError:
            continue
        return folder / name
    return None


def _log_folders() -> list[Path]:
    folders = [Path(tempfile.gettempdir()) / "specbench-logs"]
    with contextlib.suppress(SpecbenchError):  # no home directory: the temporary one is left
        folders.insert(0, cache_dir() / "logs")
    return folders
