"""Drafting by lengths: same tokens as whole blocks, as alone, and as without skipped steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

# Float32 sums in another order.
MAX_DIFFERENCE = 1e-4


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    worker = Path(__file__).with_name("ragged_worker.py")
    done = subprocess.run(
        [sys.executable, str(worker)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("comparison", "least"),
    [("whole_blocks", 100), ("one_by_one", 30)],
    ids=["beside vLLM's own blocks", "beside every request by itself"],
)
def test_tokens_and_confidences_are_the_same(results, comparison, least):
    found = results[comparison]
    assert len(found["equal"]) >= least
    assert all(found["equal"])
    assert max(found["difference"]) < MAX_DIFFERENCE


def test_a_draft_after_skipped_steps_is_the_same(results):
    drafts = results["after_skipping"]
    assert drafts["with"] == drafts["without"]
    assert [len(row) for row in drafts["with"]] == [7] * 4
    # Blocks that differ between requests: the context does matter.
    assert len({tuple(row) for row in drafts["with"]}) == 4
