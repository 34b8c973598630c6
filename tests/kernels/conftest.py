"""One pair of oracle workers for all kernel tests: importing vLLM twice takes seconds."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from oracle import OraclePair


@pytest.fixture(scope="session")
def pair() -> Iterator[OraclePair]:
    """The Triton kernels under the interpreter and their twins, callable together."""
    for package in ("vllm", "triton"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: the kernels cannot be run")
    workers = OraclePair()
    yield workers
    workers.close()
