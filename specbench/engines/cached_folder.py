"""A folder built once into the cache: written elsewhere, renamed into place, checked on use.

``manifest.json`` inside the folder lists every file with size, modification time and
SHA-256. It is written last, so a folder without one was never finished. Format history:

1  ``format``, ``source_sha256``, ``recipe``, ``files.<name>.{size,mtime_ns,sha256}``.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from specbench.cache import ensure_writable
from specbench.errors import EnvironmentProblem

MANIFEST_NAME = "manifest.json"
MANIFEST_FORMAT = 1

# A conversion takes 20 s on two cores; a slow disk or a busy machine may need ten times that.
LOCK_TIMEOUT_S = 900.0

_HASH_BLOCK_BYTES = 1 << 20

FolderStatus = Literal["ready", "absent", "stale", "corrupt"]
Notify = Callable[[str], None]


@dataclass(frozen=True)
class FolderState:
    """What a check of a cached folder found.

    Attributes:
        status: "ready"; "absent": nothing there; "stale": built from another source or by an
            older recipe; "corrupt": a file is missing, cut or altered.
        detail: what is wrong, empty when ready.
    """

    status: FolderStatus
    detail: str = ""


@dataclass(frozen=True)
class CachedFolder:
    """How one cached folder is made.

    Attributes:
        path: where it lives; its parent also holds the lock and unfinished builds.
        label: what messages call it.
        source_sha256: SHA-256 of what it is made from.
        recipe: version of the way it is made; another number rebuilds it.
        need_bytes: free space that building needs.
    """

    path: Path
    label: str
    source_sha256: str
    recipe: int
    need_bytes: int


def say(message: str) -> None:
    """Default for ``notify``: one line on stderr, so that stdout stays machine-readable."""
    print(message, file=sys.stderr, flush=True)


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's content, as lower-case hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def inspect(spec: CachedFolder, *, verify: bool = False) -> FolderState:
    """Check a cached folder without changing it.

    Sizes and modification times are compared with the manifest; a file whose time differs
    (a copied cache) is hashed. With ``verify`` every file is hashed.
    """
    if not spec.path.is_dir():
        return FolderState("absent", "not built yet")
    manifest = _read_manifest(spec.path)
    if manifest is None:
        return FolderState("corrupt", f"{MANIFEST_NAME} is missing or unreadable")
    if manifest["source_sha256"] != spec.source_sha256 or manifest["recipe"] != spec.recipe:
        return FolderState("stale", "made from another source or by an older version")
    for name, entry in manifest["files"].items():
        if problem := _file_problem(spec.path / name, entry, verify=verify):
            return FolderState("corrupt", problem)
    return FolderState("ready")


def ensure(
    spec: CachedFolder,
    build: Callable[[Path], None],
    *,
    verify: bool = False,
    notify: Notify = say,
) -> Path:
    """Return the folder, building or rebuilding it if the check fails.

    ``build`` fills an empty folder beside the final place; the result is renamed into place
    in one step, so an interruption leaves nothing that looks finished. One process builds,
    others wait for it.

    Raises:
        EnvironmentProblem: unwritable or full cache, or another process holds the lock for
            longer than ``LOCK_TIMEOUT_S``.
    """
    state = inspect(spec, verify=verify)
    if state.status == "ready":
        return spec.path
    parent = spec.path.parent
    ensure_writable(parent, spec.need_bytes)
    lock = FileLock(parent / f".{spec.path.name}.lock")
    try:
        with lock.acquire(timeout=LOCK_TIMEOUT_S):
            # Another process may have finished while this one waited.
            state = inspect(spec, verify=verify)
            if state.status != "ready":
                _announce(spec, state, notify)
                _build_locked(spec, build)
    except Timeout:
        raise EnvironmentProblem(
            f"another process has been preparing {spec.label} for {LOCK_TIMEOUT_S / 60:.0f} min; "
            f"end it, or delete {spec.path.parent} and try again"
        ) from None
    except OSError as error:
        raise EnvironmentProblem(_disk_message(spec, error)) from error
    return spec.path


def _announce(spec: CachedFolder, state: FolderState, notify: Notify) -> None:
    if state.status == "absent":
        notify(f"preparing {spec.label} in {spec.path} (once)")
    else:
        notify(f"cached {spec.label} is {state.status} ({state.detail}): rebuilding {spec.path}")


def _build_locked(spec: CachedFolder, build: Callable[[Path], None]) -> None:
    parent, name = spec.path.parent, spec.path.name
    # Only the holder of the lock builds, so whatever lies here was left by a killed process.
    for leftover in parent.glob(f".{name}.building-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    building = parent / f".{name}.building-{os.getpid()}"
    try:
        building.mkdir()
        build(building)
        _write_manifest(building, spec)
        if spec.path.exists():
            old = parent / f".{name}.building-{os.getpid()}-old"
            os.replace(spec.path, old)
            shutil.rmtree(old, ignore_errors=True)
        os.replace(building, spec.path)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _write_manifest(folder: Path, spec: CachedFolder) -> None:
    files = {}
    for path in sorted(folder.iterdir()):
        path.chmod(0o644)  # safetensors writes 0600, which would lock others out of a shared cache
        stat = path.stat()
        files[path.name] = {
            "size": stat.st_size,
            "mtime_ns": stat.st_mtime_ns,
            "sha256": sha256_file(path),
        }
    manifest = {
        "format": MANIFEST_FORMAT,
        "source_sha256": spec.source_sha256,
        "recipe": spec.recipe,
        "files": files,
    }
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
        complete = manifest["format"] == MANIFEST_FORMAT and all(
            {"size", "mtime_ns", "sha256"} <= set(entry) for entry in manifest["files"].values()
        )
        known = {"source_sha256", "recipe"} <= set(manifest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest if complete and known and manifest["files"] else None


def _file_problem(path: Path, entry: dict[str, Any], *, verify: bool) -> str | None:
    try:
        stat = path.stat()
        if stat.st_size != entry["size"]:
            return f"{path.name} has {stat.st_size} bytes instead of {entry['size']}"
        unchanged = stat.st_mtime_ns == entry["mtime_ns"]
        if (verify or not unchanged) and sha256_file(path) != entry["sha256"]:
            return f"{path.name} does not match its checksum"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    return None


def _disk_message(spec: CachedFolder, error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return (
            f"no space left for {spec.label} in {spec.path.parent} (needs "
            f"{spec.need_bytes / 1e6:.0f} MB); free some, or set SPECBENCH_CACHE to another disk"
        )
    return (
        f"cannot write {spec.label} to {spec.path.parent}: {error.strerror or error}; "
        "set SPECBENCH_CACHE to a folder you can write to"
    )
