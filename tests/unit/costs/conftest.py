from __future__ import annotations

from pathlib import Path

import pytest

from specbench.costs import ContextCosts, CostCurve, CostTable


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has its own cache; the user's is never touched."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SPECBENCH_CACHE", str(folder))
    return folder


@pytest.fixture
def table() -> CostTable:
    return CostTable(
        contexts=(
            ContextCosts(
                256,
                draft=CostCurve((0, 7, 28), (1.0, 4.0, 10.0)),
                verify=CostCurve((1, 8, 32), (14.0, 16.0, 40.0)),
            ),
            ContextCosts(
                1024,
                draft=CostCurve((0, 14), (2.0, 8.0)),
                verify=CostCurve((1, 16), (15.0, 30.0)),
            ),
        ),
        fingerprint={"model": "m", "dtype": "bfloat16", "threads": "2"},
        provenance={"repeats": 5},
    )
