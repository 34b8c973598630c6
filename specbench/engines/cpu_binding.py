"""Which cores each rank of a multi-rank CPU engine gets, where vLLM cannot tell by itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from specbench.errors import UsageError

NODES = Path("/sys/devices/system/node")
BINDING_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"


def bind_ranks(num_ranks: int) -> str | None:
    """vLLM's binding for ``num_ranks`` workers on this machine; None leaves it to vLLM.

    vLLM gives each rank a NUMA node and refuses more ranks than nodes. Then the cores are
    split evenly; a binding that the user has set is left alone.

    Raises:
        UsageError: fewer cores than ranks.
    """
    num_nodes = len(list(NODES.glob("node[0-9]*"))) or 1
    if num_ranks <= num_nodes or os.environ.get(BINDING_VARIABLE, "auto") != "auto":
        return None
    return split_cores(sorted(os.sched_getaffinity(0)), num_ranks)


def split_cores(cores: Sequence[int], num_ranks: int) -> str:
    """Contiguous, equal shares in vLLM's notation: ``0,1|2,3`` for two ranks on four cores.

    Raises:
        UsageError: fewer cores than ranks.
    """
    share = len(cores) // num_ranks
    if share == 0:
        raise UsageError(f"{num_ranks} ranks need as many cores; this machine has {len(cores)}")
    groups = [cores[rank * share : (rank + 1) * share] for rank in range(num_ranks)]
    return "|".join(",".join(map(str, group)) for group in groups)
