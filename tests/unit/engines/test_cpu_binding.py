"""Cores of the ranks of a CPU engine."""

from __future__ import annotations

import pytest

from specbench.engines import cpu_binding
from specbench.errors import UsageError


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [([0, 1], 2, "0|1"), ([0, 1, 2, 3], 2, "0,1|2,3"), ([4, 6, 8], 2, "4|6"), ([5], 1, "5")],
)
def test_cores_are_split_evenly(cores, ranks, expected):
    assert cpu_binding.split_cores(cores, ranks) == expected


def test_too_few_cores_are_refused():
    with pytest.raises(UsageError, match="3 ranks need as many cores"):
        cpu_binding.split_cores([0, 1], 3)


def test_enough_numa_nodes_or_a_binding_of_the_users_are_left_alone(monkeypatch, tmp_path):
    monkeypatch.delenv(cpu_binding.BINDING_VARIABLE, raising=False)
    for name in ("node0", "node1", "online"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(cpu_binding, "NODES", tmp_path)
    monkeypatch.setattr(cpu_binding.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert cpu_binding.bind_ranks(2) is None
    assert cpu_binding.bind_ranks(4) == "0|1|2|3"
    monkeypatch.setenv(cpu_binding.BINDING_VARIABLE, "0|1|2|3")
    assert cpu_binding.bind_ranks(4) is None
