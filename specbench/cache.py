"""The cache directory, and writing into it without leaving half a file behind."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from specbench.errors import EnvironmentProblem

CACHE_ENV = "SPECBENCH_CACHE"


def cache_dir() -> Path:
    """Where derived files are kept; not created here.

    ``SPECBENCH_CACHE`` wins, then ``$XDG_CACHE_HOME/specbench``, then
    ``~/.cache/specbench``. A relative ``XDG_CACHE_HOME`` is ignored, as the XDG base
    directory specification asks.

    Raises:
        EnvironmentProblem: the directory lies in a home directory that does not exist.
    """
    chosen = os.environ.get(CACHE_ENV)
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    try:
        if chosen:
            return Path(chosen).expanduser().absolute()
        if xdg and Path(xdg).is_absolute():
            return Path(xdg) / "specbench"
        return Path.home() / ".cache" / "specbench"
    except RuntimeError as problem:
        raise EnvironmentProblem(
            f"no home directory to keep a cache in; set {CACHE_ENV} to a writable directory"
        ) from problem


def ensure_writable(path: Path, need_bytes: int) -> None:
    """Create the directory ``path`` if missing and check that ``need_bytes`` fit into it.

    A probe file is written rather than permission bits read: bits say nothing about
    read-only mounts or quotas, and are ignored for the superuser.

    Raises:
        EnvironmentProblem: it cannot be created or written, or the disk is too full.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".probe-"):
            pass
        free_bytes = shutil.disk_usage(path).free
    except OSError as problem:
        raise EnvironmentProblem(_cannot_write(path, problem)) from problem
    if free_bytes < need_bytes:
        raise EnvironmentProblem(
            f"{path}: {_mib(need_bytes)} needed, {_mib(free_bytes)} free; "
            f"make room or {_elsewhere(path)}"
        )


def write_text_atomically(path: Path, text: str) -> None:
    """:func:`write_bytes_atomically` of ``text`` in UTF-8."""
    write_bytes_atomically(path, text.encode("utf-8"))


def write_bytes_atomically(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content`` in one step; readers see the old file or the new one.

    Raises:
        EnvironmentProblem: the directory cannot be written or the disk is full. The old
            file, if there was one, is untouched.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f".{path.name}-", delete=False
        ) as handle:
            temporary = Path(handle.name)
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        # Temporary files are created for their owner alone; results may be shared.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as problem:
        raise EnvironmentProblem(_cannot_write(path, problem)) from problem
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _umask() -> int:
    # The only portable way to read it is to set it.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _cannot_write(path: Path, problem: OSError) -> str:
    reason = problem.strerror or str(problem)
    return f"cannot write {path}: {reason}; {_elsewhere(path)}"


def _elsewhere(path: Path) -> str:
    """The way out: only files of the cache move with the variable."""
    if path.absolute().is_relative_to(cache_dir()):
        return f"set {CACHE_ENV} to a directory elsewhere"
    return "choose another path"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
