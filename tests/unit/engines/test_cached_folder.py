"""A folder built once: checked, rebuilt, safe against interruption and against two builders."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

from specbench.engines import cached_folder
from specbench.engines.cached_folder import MANIFEST_NAME, CachedFolder, ensure, inspect
from specbench.errors import EnvironmentProblem

CONTENT = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 64}


def make_spec(root: Path, *, source: str = "a" * 64, recipe: int = 1) -> CachedFolder:
    return CachedFolder(root / "models" / "toy", "toy model", source, recipe, need_bytes=1000)


class Builder:
    """Writes CONTENT and counts how often it was asked to."""

    def __init__(self) -> None:
        self.num_builds = 0

    def __call__(self, folder: Path) -> None:
        self.num_builds += 1
        for name, data in CONTENT.items():
            (folder / name).write_bytes(data)


def silent(_: str) -> None:
    """Swallow the progress line."""


def leftovers(spec: CachedFolder) -> list[str]:
    return [path.name for path in spec.path.parent.iterdir() if "building" in path.name]


def test_builds_once_then_reuses(tmp_path: Path) -> None:
    spec, builder, lines = make_spec(tmp_path), Builder(), []
    assert inspect(spec).status == "absent"
    assert ensure(spec, builder, notify=lines.append) == spec.path
    assert ensure(spec, builder, notify=lines.append) == spec.path
    assert builder.num_builds == 1
    assert lines == [f"preparing toy model in {spec.path} (once)"]
    assert {p.name for p in spec.path.iterdir()} == {*CONTENT, MANIFEST_NAME}
    assert inspect(spec, verify=True).status == "ready"
    assert leftovers(spec) == []


def test_files_are_readable_by_others(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)

    def private(folder: Path) -> None:
        Builder()(folder)
        (folder / "model.safetensors").chmod(0o600)

    ensure(spec, private, notify=silent)
    assert (spec.path / "model.safetensors").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("damage", "detail"),
    [
        (lambda p: (p / "model.safetensors").write_bytes(b"short"), "5 bytes instead of 16384"),
        (lambda p: (p / "config.json").unlink(), "config.json is missing"),
        (lambda p: (p / "config.json").write_bytes(b"[]"), "does not match its checksum"),
        (lambda p: (p / MANIFEST_NAME).unlink(), "manifest.json is missing"),
        (lambda p: (p / MANIFEST_NAME).write_text("{"), "manifest.json is missing or unreadable"),
        (lambda p: (p / MANIFEST_NAME).write_text("[]"), "manifest.json is missing or unreadable"),
    ],
    ids=["cut", "deleted", "altered", "no-manifest", "broken-manifest", "wrong-manifest"],
)
def test_damage_is_found_and_repaired_with_one_line(tmp_path: Path, damage, detail: str) -> None:
    spec, builder, lines = make_spec(tmp_path), Builder(), []
    ensure(spec, builder, notify=silent)
    damage(spec.path)
    state = inspect(spec)
    assert state.status == "corrupt"
    assert detail in state.detail
    ensure(spec, builder, notify=lines.append)
    assert builder.num_builds == 2
    assert len(lines) == 1
    assert "rebuilding" in lines[0]
    assert detail in lines[0]
    assert (spec.path / "model.safetensors").read_bytes() == CONTENT["model.safetensors"]
    assert inspect(spec, verify=True).status == "ready"


def test_same_size_and_time_is_caught_only_by_verify(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    ensure(spec, Builder(), notify=silent)
    weights = spec.path / "model.safetensors"
    stat = weights.stat()
    weights.write_bytes(bytes(len(CONTENT["model.safetensors"])))
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert inspect(spec).status == "ready"
    assert inspect(spec, verify=True).status == "corrupt"


def test_copied_cache_is_accepted_after_hashing(tmp_path: Path) -> None:
    spec, builder = make_spec(tmp_path), Builder()
    ensure(spec, builder, notify=silent)
    other = make_spec(tmp_path / "copy")
    shutil.copytree(spec.path, other.path, copy_function=shutil.copyfile)
    for path in other.path.iterdir():
        os.utime(path, ns=(1, 1))
    assert ensure(other, builder, notify=silent) == other.path
    assert builder.num_builds == 1


@pytest.mark.parametrize("change", [{"source": "b" * 64}, {"recipe": 2}])
def test_other_source_or_recipe_rebuilds(tmp_path: Path, change) -> None:
    builder, lines = Builder(), []
    ensure(make_spec(tmp_path), builder, notify=silent)
    changed = make_spec(tmp_path, **change)
    assert inspect(changed).status == "stale"
    ensure(changed, builder, notify=lines.append)
    assert builder.num_builds == 2
    assert "stale" in lines[0]


@pytest.mark.parametrize("exception", [KeyboardInterrupt, RuntimeError])
def test_interrupted_build_leaves_nothing(tmp_path: Path, exception) -> None:
    spec = make_spec(tmp_path)

    def interrupted(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise exception

    with pytest.raises(exception):
        ensure(spec, interrupted, notify=silent)
    assert inspect(spec).status == "absent"
    assert leftovers(spec) == []


def test_failed_rebuild_keeps_the_old_folder(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    ensure(spec, Builder(), notify=silent)
    (spec.path / "config.json").unlink()

    def failing(folder: Path) -> None:
        raise RuntimeError("converter crashed")

    with pytest.raises(RuntimeError):
        ensure(spec, failing, notify=silent)
    assert (spec.path / "model.safetensors").exists()


def test_leftovers_of_a_killed_build_are_removed(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    dead = spec.path.parent / f".{spec.path.name}.building-999999"
    dead.mkdir(parents=True)
    (dead / "model.safetensors").write_bytes(b"half")
    ensure(spec, Builder(), notify=silent)
    assert not dead.exists()


@pytest.mark.parametrize(
    ("code", "words"), [(errno.ENOSPC, "no space left"), (errno.EACCES, "cannot write")]
)
def test_disk_errors_say_what_to_do(tmp_path: Path, code: int, words: str) -> None:
    spec = make_spec(tmp_path)

    def failing(folder: Path) -> None:
        raise OSError(code, os.strerror(code))

    with pytest.raises(EnvironmentProblem, match=words) as caught:
        ensure(spec, failing, notify=silent)
    assert "SPECBENCH_CACHE" in str(caught.value)
    assert leftovers(spec) == []


def test_a_lock_held_too_long_is_reported(tmp_path: Path, monkeypatch) -> None:
    spec = make_spec(tmp_path)
    spec.path.parent.mkdir(parents=True)
    monkeypatch.setattr(cached_folder, "LOCK_TIMEOUT_S", 0.05)
    with (
        cached_folder.FileLock(spec.path.parent / f".{spec.path.name}.lock"),
        pytest.raises(EnvironmentProblem, match="another process"),
    ):
        ensure(spec, Builder(), notify=silent)


def _build_in_child(root: str, log: str) -> None:
    def slow(folder: Path) -> None:
        with open(log, "a") as file:
            file.write("built\n")
        Builder()(folder)

    ensure(make_spec(Path(root)), slow, notify=silent)


def test_two_processes_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    log = tmp_path / "log"
    children = [
        context.Process(target=_build_in_child, args=(str(tmp_path), str(log))) for _ in range(3)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(timeout=120)
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert log.read_text() == "built\n"


def test_manifest_lists_every_file(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    ensure(spec, Builder(), notify=silent)
    manifest = json.loads((spec.path / MANIFEST_NAME).read_text())
    assert manifest["source_sha256"] == spec.source_sha256
    assert {name: entry["size"] for name, entry in manifest["files"].items()} == {
        name: len(data) for name, data in CONTENT.items()
    }
