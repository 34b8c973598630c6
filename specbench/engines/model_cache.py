"""Which target and which drafter a run uses: the embedded default, a local folder or a hub id."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from specbench.engines import cached_folder, default_model
from specbench.engines.cached_folder import FolderState, Notify, say, sha256_file
from specbench.errors import EnvironmentProblem, InputError

DEFAULT_DRAFTER = "smollm2-135m-dspark"
NO_DRAFTER = "none"
PROVENANCE_NAME = "provenance.json"

_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
# Weights of a fine-tuned model differ everywhere, so the ends of each file tell two models
# apart; hashing tens of gigabytes before every run would cost minutes.
_FINGERPRINT_SAMPLE_BYTES = 1 << 20
# Hugging Face repository ids: an optional owner and a name, 96 characters at most each.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[\w.-]{1,96})?")


@dataclass(frozen=True)
class ModelRef:
    """A target model as the engine is told it.

    Attributes:
        path_or_id: absolute folder, or a hub id.
        fingerprint: hex digest that names these weights; see :func:`fingerprint_folder`.
        is_default: the embedded default model.
    """

    path_or_id: str
    fingerprint: str
    is_default: bool


@dataclass(frozen=True)
class DrafterRef:
    """A drafter checkpoint as the engine is told it; fields as in :class:`ModelRef`."""

    path_or_id: str
    fingerprint: str
    is_default: bool


def default_target(*, verify: bool = False, notify: Notify = say) -> Path:
    """Folder of the embedded default model, converted on first use (20 s, 273 MB).

    Args:
        verify: hash every cached file instead of comparing sizes and times.
        notify: receives one line when the model is built or rebuilt.

    Raises:
        EnvironmentProblem: its package is missing, or the cache is full or unwritable.
    """
    folder = default_model.default_folder()
    return cached_folder.ensure(folder, default_model.convert, verify=verify, notify=notify)


def inspect_default_target(*, verify: bool = False) -> FolderState:
    """State of the cached default model; builds nothing."""
    return cached_folder.inspect(default_model.default_folder(), verify=verify)


def resolve_model(model: str | None) -> ModelRef:
    """Turn ``--model`` into a reference.

    None is the embedded default, an existing folder is checked and fingerprinted, anything
    else must look like a hub id and is left to the engine to fetch.

    Raises:
        InputError: not a folder, a folder without ``config.json``, or not a possible hub id.
        EnvironmentProblem: the default model cannot be prepared.
    """
    if model is None:
        path = default_target()
        return ModelRef(str(path), fingerprint_folder(path), is_default=True)
    path_or_id, fingerprint = _resolve_given(model, "--model")
    return ModelRef(path_or_id, fingerprint, is_default=False)


def resolve_drafter(drafter: str | None, model: ModelRef) -> DrafterRef | None:
    """Turn ``--drafter`` into a reference; None where the run has no model drafter.

    None stands for the drafter shipped for the default model, and for no drafter with any
    other model. ``"none"`` is no drafter.

    Raises:
        InputError: as for :func:`resolve_model`.
        EnvironmentProblem: the shipped drafter is missing or does not match its provenance.
    """
    if drafter == NO_DRAFTER or (drafter is None and not model.is_default):
        return None
    if drafter is None:
        path = shipped_drafter()
        return DrafterRef(str(path), fingerprint_folder(path), is_default=True)
    path_or_id, fingerprint = _resolve_given(drafter, "--drafter")
    return DrafterRef(path_or_id, fingerprint, is_default=False)


def shipped_drafter(name: str = DEFAULT_DRAFTER) -> Path:
    """Folder of a drafter that comes with the package, checked against its provenance file.

    Raises:
        EnvironmentProblem: a file is missing or its SHA-256 differs.
    """
    folder = Path(str(files("specbench"))) / "calibrations" / name
    check_provenance(folder)
    return folder


def check_provenance(folder: Path) -> None:
    """Compare a folder's files with the SHA-256 values in its provenance file.

    Raises:
        EnvironmentProblem: the provenance file or a listed file is missing or differs.
    """
    remedy = "install specbench again (in a clone: `git checkout -- calibrations`)"
    try:
        listed = json.loads((folder / PROVENANCE_NAME).read_text(encoding="utf-8"))["files"]
        expected = {name: entry["sha256"] for name, entry in listed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise EnvironmentProblem(
            f"{folder / PROVENANCE_NAME} is missing or unreadable: {remedy}"
        ) from None
    for name, digest in expected.items():
        path = folder / name
        if not path.is_file():
            raise EnvironmentProblem(f"{path} is missing: {remedy}")
        if sha256_file(path) != digest:
            raise EnvironmentProblem(f"{path} does not match its checksum: {remedy}")


def fingerprint_folder(folder: Path) -> str:
    """Name the weights in a folder: 64 hex digits, the same wherever the folder lies.

    SHA-256 over ``config.json``, then for each weight file in name order its name, its size
    and its first and last MiB. A change confined to the middle of a weight file goes unseen.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.iterdir()):
        if path.suffix not in _WEIGHT_SUFFIXES or not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"\0{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(_FINGERPRINT_SAMPLE_BYTES))
            file.seek(max(0, size - _FINGERPRINT_SAMPLE_BYTES))
            digest.update(file.read(_FINGERPRINT_SAMPLE_BYTES))
    return digest.hexdigest()


def fingerprint_hub_id(hub_id: str) -> str:
    """Name a model by its hub id alone: its files may not have been fetched yet."""
    return hashlib.sha256(f"hub:{hub_id}".encode()).hexdigest()


def _resolve_given(value: str, option: str) -> tuple[str, str]:
    try:
        path = Path(value).expanduser()
        if value and path.is_dir():
            return _resolve_folder(path.resolve(), option)
        if value and path.exists():
            raise InputError(f"{option} {value}: is a file; name the folder that has config.json")
    except (OSError, RuntimeError) as error:  # a name too long, an unknown user after "~"
        raise InputError(f"{option} {value}: no such folder ({error})") from None
    looks_like_path = value.startswith((".", "/", "~")) or value.count("/") > 1
    if looks_like_path:
        raise InputError(f"{option} {value}: no such folder")
    if not _HUB_ID.fullmatch(value):
        raise InputError(f"{option} {value!r}: neither a folder nor a hub id such as owner/name")
    return value, fingerprint_hub_id(value)


def _resolve_folder(path: Path, option: str) -> tuple[str, str]:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise InputError(f"{option} {path}: config.json is not a JSON object")
        has_weights = any(file.suffix in _WEIGHT_SUFFIXES for file in path.iterdir())
        if not has_weights:
            raise InputError(f"{option} {path}: no weight files (*.safetensors) in this folder")
        return str(path), fingerprint_folder(path)
    except FileNotFoundError:
        raise InputError(f"{option} {path}: no config.json in this folder") from None
    except ValueError as error:
        raise InputError(f"{option} {path}: config.json is not valid JSON ({error})") from None
    except OSError as error:
        raise InputError(f"{option} {path}: cannot be read ({error.strerror})") from None
