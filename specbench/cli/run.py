"""``specbench run``: measure one policy."""

from __future__ import annotations

from typing import Annotated

import typer

from specbench.cli.benchmark import execute
from specbench.cli.options import BenchmarkOptions, with_benchmark_options


@with_benchmark_options
def run(
    policy: Annotated[
        str, typer.Option("--policy", "-p", help="Policy: name or name:argument, like dspark:3.")
    ],
    options: BenchmarkOptions,
) -> None:
    """Measure one policy on a workload."""
    execute([policy], options)
