from __future__ import annotations

import errno
import shutil
import stat
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from specbench.cache import cache_dir, ensure_writable, write_text_atomically
from specbench.errors import EnvironmentProblem


def test_the_environment_variable_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path


def test_xdg_then_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECBENCH_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/specbench")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "specbench"


def test_an_unknown_home_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBENCH_CACHE", "~nobody-of-this-name/cache")
    with pytest.raises(EnvironmentProblem, match="SPECBENCH_CACHE"):
        cache_dir()


def test_ensure_writable_creates_the_directory_and_leaves_it_empty(tmp_path: Path) -> None:
    ensure_writable(tmp_path / "a" / "b", 1)
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_ensure_writable_says_how_much_is_missing(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * 2**20))
    ensure_writable(cache, 3 * 2**20)
    with pytest.raises(EnvironmentProblem, match=r"300\.0 MiB needed, 3\.0 MiB free.*SPECBENCH"):
        ensure_writable(cache, 300 * 2**20)


def test_ensure_writable_reports_refusal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    with pytest.raises(EnvironmentProblem, match="Permission denied; choose another path"):
        ensure_writable(tmp_path / "elsewhere", 1)


def test_written_files_follow_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.json"
    (tmp_path / "plain").write_text("x")
    write_text_atomically(path, "text\n")
    assert path.read_text() == "text\n"
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)
