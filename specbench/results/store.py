"""Writing result files so that they are never half there, and reading them back."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from specbench.cache import write_text_atomically
from specbench.errors import EnvironmentProblem, InputError, SpecbenchError, UsageError
from specbench.results.document import RESULT_FORMAT, ResultDocument, check_document


def check_output_path(path: Path) -> None:
    """Make sure, before anything is measured, that a result can be written to ``path``.

    An existing file is replaced only if it is a result file (or empty), so that a slip in
    a path does not destroy something else.

    Raises:
        UsageError: says what is in the way.
    """
    if path.is_dir():
        raise UsageError(f"--output {path} is a directory; name a file")
    if path.exists():
        if not path.is_file():
            raise UsageError(f"--output {path} is not a regular file")
        if not os.access(path, os.W_OK):
            raise UsageError(f"--output {path} is write-protected")
        if not _is_replaceable(path):
            raise UsageError(
                f"--output {path} exists and is not a specbench result; it is left alone: "
                "choose another name"
            )
    parent = path.parent
    if not parent.is_dir():
        raise UsageError(f"--output {path}: there is no directory {parent}")
    _try_writing(parent, f"--output {path}")


def check_records_directory(path: Path) -> None:
    """Create the directory for record files if need be, and make sure it can be written.

    Raises:
        UsageError: says what is in the way.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--records {path} cannot be used as a directory: {error.strerror}"
        ) from None
    _try_writing(path, f"--records {path}")


def write_result(path: Path, document: ResultDocument) -> None:
    """Write ``document`` as JSON; readers see the old file or the whole new one.

    Raises:
        SpecbenchError: the file could not be written after all (disk full, removed).
    """
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    try:
        write_text_atomically(path, text)
    except EnvironmentProblem as problem:
        raise SpecbenchError(f"the result was not saved: {problem}") from problem


def load_result(path: Path) -> ResultDocument:
    """Read a result file.

    Raises:
        InputError: not readable, cut short, not a result file, or newer than this program.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a specbench result file (not text)") from None
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        reason = (
            "cut short" if error.pos >= len(text.rstrip()) else f"broken at line {error.lineno}"
        )
        raise InputError(f"{path} is not valid JSON: {reason}") from None
    return check_document(data, str(path))


def _is_replaceable(path: Path) -> bool:
    try:
        text = path.read_text(encoding="utf-8")
        return not text.strip() or json.loads(text).get("format") == RESULT_FORMAT
    except (OSError, ValueError, AttributeError):
        return False


def _try_writing(directory: Path, what: str) -> None:
    # Trying is the only reliable test: permission bits say nothing to the superuser, about
    # read-only mounts, or about full disks.
    try:
        with tempfile.NamedTemporaryFile(prefix=".specbench-", dir=directory) as probe:
            probe.write(b"x")
    except OSError as error:
        raise UsageError(f"{what}: cannot write in {directory}: {error.strerror}") from None
