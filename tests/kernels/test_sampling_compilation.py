"""How kernels are compiled: threads shared with torch, and caches that cannot mislead or crash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
ARGMAX = """
import torch
from specbench.kernels.cpu import rows
torch.set_num_threads({threads})
assert rows.argmax(torch.eye(3)).tolist() == [0, 1, 2]
import numba
print(torch.get_num_threads(), numba.get_num_threads())
"""
# Two kernels; the second file's function is compiled into the first's.
INNER = "from compilation import vectorised\n\n@vectorised()\ndef inner():\n    return {value}\n"
OUTER = (
    "from compilation import vectorised\nfrom inner import inner\n\n"
    "@vectorised()\ndef outer():\n    return inner()\n"
)


def python(code: str, path: Path, **environment: str) -> str:
    """Output of a fresh interpreter running ``code``."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(path), **environment},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def test_uses_torchs_thread_count_and_leaves_it() -> None:
    # Two numba threads exist; torch was told to use one.
    out = python(ARGMAX.format(threads=1), REPOSITORY, NUMBA_NUM_THREADS="2")
    assert out == "1 1"
    out = python(ARGMAX.format(threads=3), REPOSITORY, NUMBA_NUM_THREADS="2")
    assert out == "3 2"


def test_runs_where_no_cache_can_be_written() -> None:
    code = (
        "from numba.core import caching\n"
        # As with a read-only package and a read-only home.
        "caching.CacheImpl._locator_classes = []\n" + ARGMAX.format(threads=1)
    )
    assert python(code, REPOSITORY, NUMBA_NUM_THREADS="1") == "1 1"


def test_cached_code_follows_changes_of_other_files(tmp_path: Path) -> None:
    shutil.copy(REPOSITORY / "kernels" / "cpu" / "compilation.py", tmp_path)
    (tmp_path / "outer.py").write_text(OUTER)
    for value in ("11", "2222"):
        (tmp_path / "inner.py").write_text(INNER.format(value=value))
        for _ in range(2):  # the second run loads what the first cached
            assert python("from outer import outer; print(outer())", tmp_path) == value
