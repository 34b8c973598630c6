"""``specbench compare``: measure policies against each other in one engine."""

from __future__ import annotations

from typing import Annotated

import typer

from specbench.cli.benchmark import execute
from specbench.cli.options import BenchmarkOptions, with_benchmark_options
from specbench.errors import UsageError


@with_benchmark_options
def compare(
    policies: Annotated[
        list[str],
        typer.Argument(
            metavar="A B [C...]",
            help="Policies, the baseline first. The same one twice shows the noise.",
            show_default=False,
        ),
    ],
    options: BenchmarkOptions,
) -> None:
    """Compare policies on the same prompts, in interleaved rounds, in one engine.

    Ratios are to the first policy, with a 95% interval from the spread over rounds.
    """
    if len(policies) < 2:
        raise UsageError("compare needs at least two policies, for example: compare ar ngram")
    execute(policies, options)
