"""A result document as tables: 80 columns suffice, and a pipe gets plain text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specbench.results.document import DistributionMs, PolicyResult, Ratio, ResultDocument

UNDEFINED = "-"
# A pipe has no width of its own; this is the one that terminals agree on.
PIPED_WIDTH = 80

# A ratio of ten and more is not known to a hundredth, and would not fit the width.
TWO_DECIMALS_BELOW = 10.0

Cell = Callable[[PolicyResult], str]


def print_result(document: ResultDocument, console: Console | None = None) -> None:
    """Print both tables, what they are about, and the warnings."""
    console = console or result_console()
    framed = console.is_terminal
    if not document["complete"]:
        _say(console, "PARTIAL RESULT", style="bold yellow")
    console.print(speed_table(document, framed=framed))
    console.print()
    console.print(speculation_table(document, framed=framed))
    console.print()
    for line in caption_lines(document):
        _say(console, line, style="dim")
    for warning in document["warnings"]:
        _say(console, f"warning: {warning}", style="yellow")


def result_console() -> Console:
    """Standard output, at a fixed width unless it is a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPED_WIDTH, soft_wrap=False)


def speed_table(document: ResultDocument, *, framed: bool) -> Table:
    """Throughput, ratio and latencies; one row a policy."""
    columns: list[tuple[str, Cell]] = [
        ("tokens/s", lambda p: number(p["output_throughput"], 1)),
        ("ratio [95%]", lambda p: ratio_text(p["ratio_to_baseline"])),
        ("TTFT ms\np50/p99", lambda p: median_p99(p["ttft_ms"])),
        ("TPOT ms\np50/p99", lambda p: median_p99(p["tpot_ms"])),
        ("E2EL ms\np50/p99", lambda p: median_p99(p["e2el_ms"])),
    ]
    return _table(document, columns, framed)


def speculation_table(document: ResultDocument, *, framed: bool) -> Table:
    """What was drafted, verified and kept; one row a policy."""
    columns: list[tuple[str, Cell]] = [
        ("tokens\n/draft", lambda p: number(p["acceptance_length"], 2)),
        ("tokens\n/step", lambda p: number(p["acceptance_length_per_step"], 2)),
        ("verified\ntokens", lambda p: str(p["verified_tokens"])),
        ("never\nverified", lambda p: str(p.get("unverified_tokens", UNDEFINED))),
        ("draft\ntime", lambda p: percent(p["draft_share"])),
        ("no\ndraft", lambda p: percent(p.get("undrafted_share"))),
        ("in\ncycles", lambda p: percent(p["cycle_share"])),
    ]
    return _table(document, columns, framed)


def caption_lines(document: ResultDocument) -> list[str]:
    """Workload, load, sampling, model and machine, in words."""
    spec, environment = document["spec"], document["environment"]
    engine = environment.get("engine", {})
    sampling = spec["sampling"]
    machine = engine.get("gpu") or engine.get("processor") or environment.get("processor")
    drafter = spec["drafter"] or "none"
    rounds = spec["rounds"]
    version = engine.get("vllm_version")
    software = f"; vLLM {version}" if version else ""
    return [
        f"workload {spec['workload']}: {spec['num_prompts']} prompts in {rounds} "
        f"round{'s' if rounds > 1 else ''}, {spec['max_concurrency']} at a time, "
        f"temperature {sampling['temperature']:g}",
        f"model {spec['model']}, drafter {drafter}; {machine}{software}",
        "tokens/draft: steps with a draft, bonus token included; tokens/step: all steps",
        "never verified: tokens drafted for nothing; no draft: steps that drafted none",
    ]


def number(value: float | None, digits: int) -> str:
    """Fixed number of decimals, or a dash where undefined."""
    return UNDEFINED if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """Share in percent, or a dash where undefined."""
    return UNDEFINED if value is None else f"{value:.1%}"


def ratio_text(ratio: Ratio) -> str:
    """``1.53 [1.41, 1.66]``; without an interval the ratio alone."""
    value, interval = ratio["value"], ratio["ci95"]
    if value is None or interval is None:
        return number(value, 2)
    digits = 2 if value < TWO_DECIMALS_BELOW else 1
    low, high = (number(bound, digits) for bound in interval)
    return f"{number(value, digits)} [{low}, {high}]"


def median_p99(distribution: DistributionMs | None) -> str:
    """``median/p99`` with three significant digits or whole milliseconds."""
    if distribution is None:
        return UNDEFINED
    return f"{_short_ms(distribution['median'])}/{_short_ms(distribution['p99'])}"


def _short_ms(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _table(document: ResultDocument, columns: Sequence[tuple[str, Cell]], framed: bool) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD if framed else None,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
        padding=(0, 1),
    )
    table.add_column("policy", no_wrap=True)
    for header, _ in columns:
        table.add_column(header, justify="right", no_wrap=True)
    for label, policy in document["policies"].items():
        table.add_row(escape(label), *(escape(cell(policy)) for _, cell in columns))
    return table


def _say(console: Console, line: str, style: str) -> None:
    console.print(line, style=style, markup=False, highlight=False)
