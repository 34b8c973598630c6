"""``specbench costs``: show, import, export, check, locate and profile step-cost tables."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from specbench import costs
from specbench.cache import ensure_writable, write_text_atomically
from specbench.costs import ContextCosts, CostCurve, CostTable, TableFormat
from specbench.costs.interop import detect_format
from specbench.costs.store import MAX_FILE_BYTES, read_json_object
from specbench.errors import InputError, UsageError

if TYPE_CHECKING:
    from specbench.engines.config import EngineConfig

app = typer.Typer(no_args_is_help=True, help="Step-cost tables of the engines profiled here.")

# Wide enough for every column; a pipe has no width, and Rich would assume 80.
_PIPED_WIDTH = 160
_DraftLength = Annotated[
    int | None, typer.Option(help="Tokens every request drafts: links batch overhead and draft.")
]


@app.command()
def show(
    path: Annotated[
        Path | None, typer.Argument(help="Table to show; all cached ones if left out.")
    ] = None,
) -> None:
    """Print costs by size and context length, with what one further token costs."""
    console = _console()
    paths = [path] if path is not None else costs.cached_tables()
    if not paths:
        console.print(
            f"no cost tables in {costs.tables_dir()}; 'specbench costs profile' makes one"
        )
    damaged = 0
    for number, each in enumerate(paths):
        if number:
            console.print()
        try:
            table = costs.read_table(each)
        except InputError as problem:
            if path is not None:
                raise
            damaged += 1  # one damaged file must not hide the others
            console.print(str(problem), style="red", markup=False)
            continue
        _print_table(console, table, each)
    if damaged:
        raise InputError(f"{damaged} damaged table(s) in {costs.tables_dir()}; delete them")


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="Table of TensorRT-LLM, SGLang or specbench.")],
    output: Annotated[
        Path | None, typer.Option(help="Where to write it; the cache if left out.")
    ] = None,
    context: Annotated[int, typer.Option(min=0, help="Context length it was measured at.")] = 0,
    draft_from: Annotated[
        Path | None,
        typer.Option(help="Draft curve: a specbench table or a file with tokens and ms."),
    ] = None,
    draft_length: _DraftLength = None,
    fingerprint_from: Annotated[
        Path | None,
        typer.Option(help="Profiled table of the engine to use it on; replaces that in the cache."),
    ] = None,
) -> None:
    """Convert a table of another engine; the format is told by its keys.

    An engine finds its table by fingerprint. Foreign tables have none: with
    --fingerprint-from you state that this one was measured on the same engine.
    """
    if output is not None:
        _check_output(output, source=file)
    table = costs.import_table(
        file, context_tokens=context, draft_from=draft_from, draft_length=draft_length
    )
    if fingerprint_from is not None:
        table = replace(table, fingerprint=costs.read_table(fingerprint_from).fingerprint)
    _announce(_save(table, output))


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="specbench table to export.")],
    output: Annotated[Path, typer.Option(help="File to write.")],
    format: Annotated[TableFormat, typer.Option(help="Format of the other engine.")],
    context: Annotated[
        int | None, typer.Option(min=0, help="Context length, if the table has several.")
    ] = None,
    draft_length: _DraftLength = None,
) -> None:
    """Write a table that TensorRT-LLM or SGLang reads."""
    _check_output(output, source=file)
    payload = costs.export_table(
        costs.read_table(file), format, context_tokens=context, draft_length=draft_length
    )
    write_text_atomically(output, json.dumps(payload, indent=2) + "\n")
    _announce(output)


@app.command()
def check(
    table: Annotated[Path, typer.Argument(help="Table of the engine that was measured.")],
    records: Annotated[Path, typer.Argument(help="Folder that a run wrote with --records.")],
) -> None:
    """Predict recorded steps from a table: time by policy, ratios between policies."""
    checks = costs.check_table(costs.read_table(table), _measured_steps(records))
    if not checks:
        raise InputError(f"{records} holds no step with a known duration; measure more requests")
    console = _console()
    console.print(_check_table(console, checks))


@app.command("path")
def path_() -> None:
    """Print the folder that holds the cached tables."""
    typer.echo(costs.tables_dir())


@app.command()
def profile(
    model: Annotated[
        str | None, typer.Option(help="Target model: folder or hub id. Default: the embedded one.")
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(help="Drafter: folder or hub id. Default: the embedded model's own."),
    ] = None,
    max_concurrency: Annotated[
        int, typer.Option(min=1, help="Largest batch; one table serves 1 to 16.")
    ] = 4,
    context: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Context length in tokens; repeatable. Default: 128 and 1024."),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(min=1, help="Draft slots of a request. Default: the block.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Weights: auto, bfloat16, float16, float32.")] = "auto",
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, help="Devices one copy is split over.")
    ] = 1,
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Any other vLLM engine argument; repeatable."),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let the model's repository run code.")
    ] = False,
    log_file: Annotated[
        Path | None, typer.Option(help="The engine's log. Default: a new file in the cache.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the engine's own log.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="Where to write the table; the cache if left out.")
    ] = None,
) -> None:
    """Measure draft and verify costs on this machine and keep them.

    Measures afresh even if the cache has a table of this engine, and replaces it.
    """
    from specbench.engines.config import (
        EngineConfig,
        default_log_file,
        num_seqs_for,
        parse_engine_args,
    )
    from specbench.engines.model_cache import NO_DRAFTER

    if drafter == NO_DRAFTER or (model is not None and drafter is None):
        raise UsageError("profiling needs a drafter to time: give one with --drafter")
    config = EngineConfig(
        model=model,
        drafter=drafter,
        max_num_seqs=num_seqs_for(max_concurrency),
        log_file=log_file or default_log_file(),
        dtype=dtype,
        tensor_parallel_size=tensor_parallel_size,
        engine_args=parse_engine_args(engine_arg or []),
        trust_remote_code=trust_remote_code,
        verbose=verbose,
        num_speculative_tokens=num_speculative_tokens,
    )
    # A run of minutes must not end at an unwritable path.
    if output is not None:
        _check_output(output)
    else:
        ensure_writable(costs.tables_dir(), need_bytes=MAX_FILE_BYTES)
    table = asyncio.run(_measure(config, tuple(sorted(set(context or ())))))
    saved = _save(table, output)
    _print_table(_console(), table, saved)


async def _measure(config: EngineConfig, contexts: tuple[int, ...]) -> CostTable:
    """Start an engine, profile it, stop it. Imports late: vLLM takes seconds to load."""
    from specbench.engines.vllm import start_engine
    from specbench.profiling import CONTEXT_TOKENS, profile_costs

    progress = Console(stderr=True, highlight=False)
    progress.print("starting the engine")
    engine = await start_engine(config)
    try:
        return await profile_costs(
            engine,
            contexts=contexts or CONTEXT_TOKENS,
            progress=lambda what, done, total: progress.print(f"{done}/{total} {what}"),
        )
    finally:
        await engine.close()


def _measured_steps(records: Path) -> list[costs.MeasuredStep]:
    """Steps with a known duration, warm-ups left out."""
    from specbench.results.parquet import read_steps

    return [
        costs.MeasuredStep(
            policy=row["policy"],
            context_tokens=row["context_tokens"],
            # One token of every request that decodes; a prompt's last chunk counts as one too.
            num_tokens=row["num_prompt_tokens"] + row["num_decoding"] + row["num_verified_tokens"],
            num_drafted_tokens=row["num_drafted_tokens"],
            num_emitted_tokens=row["num_emitted_tokens"],
            step_ms=row["step_ms"],
        )
        for row in read_steps(records).iter_rows(named=True)
        if not row["warmup"] and row["step_ms"] is not None
    ]


def _check_table(console: Console, checks: list[costs.PolicyCheck]) -> Table:
    view = Table(
        title=f"ratios to {checks[0].policy}",
        title_justify="left",
        box=box.SIMPLE_HEAD if console.is_terminal else None,
    )
    view.add_column("policy")
    for heading in (
        "steps",
        "ms a step",
        "predicted",
        "tokens/s",
        "predicted",
        "ratio",
        "predicted",
        "predicted / measured",
    ):
        view.add_column(heading, justify="right")
    first = checks[0]
    for each in checks:
        ratio = each.measured_tokens_per_s / first.measured_tokens_per_s
        predicted = each.predicted_tokens_per_s / first.predicted_tokens_per_s
        view.add_row(
            each.policy,
            str(each.num_steps),
            f"{each.measured_ms / each.num_steps:.2f}",
            f"{each.predicted_ms / each.num_steps:.2f}",
            f"{each.measured_tokens_per_s:.1f}",
            f"{each.predicted_tokens_per_s:.1f}",
            f"{ratio:.3f}",
            f"{predicted:.3f}",
            f"{predicted / ratio:.3f}",
        )
    return view


def _check_output(path: Path, *, source: Path | None = None) -> None:
    """Refuse a path that cannot be written, or whose file is not a cost table to replace.

    Raises:
        UsageError, EnvironmentProblem: says what is in the way.
    """
    if path.is_dir():
        raise UsageError(f"--output {path} is a directory; name a file")
    if not path.parent.is_dir():
        raise UsageError(f"--output {path}: there is no folder {path.parent}")
    if path.exists():
        if source is not None and source.exists() and path.samefile(source):
            raise UsageError(f"--output {path} is the file that is read; name another")
        try:
            detect_format(read_json_object(path), str(path))
        except InputError as problem:
            raise UsageError(
                f"--output {path} exists and is not a cost table; it is left alone: name another"
            ) from problem
    ensure_writable(path.parent, need_bytes=MAX_FILE_BYTES)


def _save(table: CostTable, output: Path | None) -> Path:
    if output is None:
        return costs.save_table(table)
    costs.write_table(table, output)
    return output


def _announce(path: Path) -> None:
    typer.echo(f"written: {path}")


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPED_WIDTH)


def _print_table(console: Console, table: CostTable, path: Path) -> None:
    console.print(f"Cost table {path}", style="bold", markup=False, soft_wrap=True)
    for key, value in sorted(table.fingerprint.items()):
        console.print(f"  {key}: {value}", markup=False, soft_wrap=True)
    if table.padding != "none":
        sizes = ", ".join(map(str, table.padding))
        console.print(f"  passes are padded to {sizes} tokens", soft_wrap=True)
    for context in table.contexts:
        console.print(_context_table(console, context))


def _context_table(console: Console, context: ContextCosts) -> Table:
    length = context.context_tokens
    title = f"context {length} tokens" if length else "context length not stated"
    view = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD if console.is_terminal else None
    )
    view.add_column("curve")
    for heading in ("tokens", "ms", "ms per further token"):
        view.add_column(heading, justify="right")
    for name, curve in (("verify", context.verify), ("draft", context.draft)):
        for row in _curve_rows(curve):
            view.add_row(name, *row)
    return view


def _curve_rows(curve: CostCurve) -> list[tuple[str, str, str]]:
    """Size, cost and slope up to the next size; the last row has the slope beyond."""
    rows = []
    for index, (tokens, ms) in enumerate(zip(curve.tokens, curve.ms, strict=True)):
        slope = curve.last_slope()
        if index + 1 < len(curve.tokens):
            slope = (curve.ms[index + 1] - ms) / (curve.tokens[index + 1] - tokens)
        rows.append((str(tokens), f"{ms:.3f}", f"{slope:.4f}"))
    return rows
