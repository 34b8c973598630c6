"""Options that ``run`` and ``compare`` share, declared once.

Typer reads options from a function's signature. :func:`with_benchmark_options` gives a
command all fields of :class:`BenchmarkOptions` as options and hands them over as one object.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

LOAD = "Load"
SAMPLING = "Sampling"
OUTPUT = "Output"
ENGINE = "Engine"


class DraftSampleMethod(StrEnum):
    """How the model drafter picks its tokens; vLLM's ``draft_sample_method``."""

    GREEDY = "greedy"
    PROBABILISTIC = "probabilistic"


@dataclass(frozen=True)
class BenchmarkOptions:
    """Everything a benchmark command can be told, in the order ``--help`` shows it."""

    workload: Annotated[
        str,
        typer.Option(help="chat, code-edit, mixed, or a JSONL file.", rich_help_panel=LOAD),
    ] = "chat"
    max_concurrency: Annotated[
        int,
        typer.Option(min=1, help="Conversations kept in flight.", rich_help_panel=LOAD),
    ] = 4
    num_prompts: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Prompts in all, dealt out over the rounds. Default: the whole workload.",
            rich_help_panel=LOAD,
        ),
    ] = None
    rounds: Annotated[
        int,
        typer.Option(
            min=1,
            help="Rounds; in each, every policy serves the same prompts once.",
            rich_help_panel=LOAD,
        ),
    ] = 5
    warmup_prompts: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Prompts served unmeasured by every policy first. Default: as "
            "many as --max-concurrency.",
            rich_help_panel=LOAD,
        ),
    ] = None
    seed: Annotated[
        int,
        typer.Option(
            min=0, help="Seed of workload, policy order and sampling.", rich_help_panel=LOAD
        ),
    ] = 0
    temperature: Annotated[
        float,
        typer.Option(min=0.0, help="0 is greedy.", rich_help_panel=SAMPLING),
    ] = 0.0
    top_p: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="Nucleus sampling; 1 is off.", rich_help_panel=SAMPLING
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        typer.Option(
            min=0, help="Keep the k likeliest tokens; 0 is off.", rich_help_panel=SAMPLING
        ),
    ] = 0
    min_p: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Drop tokens below this share of the likeliest; 0 is off.",
            rich_help_panel=SAMPLING,
        ),
    ] = 0.0
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Cap on output tokens of a request. Default: what the workload asks for.",
            rich_help_panel=SAMPLING,
        ),
    ] = None
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos",
            help="Generate up to the limit whatever the model says.",
            rich_help_panel=SAMPLING,
        ),
    ] = False
    output: Annotated[
        Path | None,
        typer.Option(help="Write the result as JSON to this file.", rich_help_panel=OUTPUT),
    ] = None
    records: Annotated[
        Path | None,
        typer.Option(
            help="Write every request and step as Parquet into this directory.",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    json_output: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the result as JSON instead of tables.", rich_help_panel=OUTPUT
        ),
    ] = False
    no_progress: Annotated[
        bool,
        typer.Option("--no-progress", help="Show no progress.", rich_help_panel=OUTPUT),
    ] = False
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="Show the engine's own log.", rich_help_panel=OUTPUT),
    ] = False
    log_file: Annotated[
        Path | None,
        typer.Option(
            help="The engine's log. Default: a new file in the cache folder.",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            help="Target model: folder or hub id. Default: the embedded one.",
            rich_help_panel=ENGINE,
        ),
    ] = None
    drafter: Annotated[
        str | None,
        typer.Option(
            help="Drafter: folder or hub id. Default: the embedded one, for the embedded "
            "model only.",
            rich_help_panel=ENGINE,
        ),
    ] = None
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Draft slots of a request. Default: 16, or the drafter's block if longer.",
            rich_help_panel=ENGINE,
        ),
    ] = None
    draft_sample_method: Annotated[
        DraftSampleMethod,
        typer.Option(
            help="Whether the model drafter takes its best token or samples at the "
            "request's temperature.",
            rich_help_panel=ENGINE,
        ),
    ] = DraftSampleMethod.GREEDY
    costs: Annotated[
        Path | None,
        typer.Option(
            help="Step-cost table to use. Default: measured on this engine once, then cached.",
            rich_help_panel=ENGINE,
        ),
    ] = None
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a calibration for policies that price n-gram chains. Default: what "
            "'specbench calibrate' made for this model, or the embedded model's own.",
            rich_help_panel=ENGINE,
        ),
    ] = None
    dtype: Annotated[
        str,
        typer.Option(
            help="Weights and activations: auto, bfloat16, float16, float32.",
            rich_help_panel=ENGINE,
        ),
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        typer.Option(min=1, help="Context length in tokens.", rich_help_panel=ENGINE),
    ] = None
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, help="Devices one copy is split over.", rich_help_panel=ENGINE)
    ] = 1
    data_parallel_size: Annotated[
        int, typer.Option(min=1, help="Copies of the engine.", rich_help_panel=ENGINE)
    ] = 1
    distributed_executor_backend: Annotated[
        str | None,
        typer.Option(help="vLLM's executor: mp, ray, external_launcher.", rich_help_panel=ENGINE),
    ] = None
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Any other vLLM engine argument; repeatable.",
            rich_help_panel=ENGINE,
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Let the model's repository run code.",
            rich_help_panel=ENGINE,
        ),
    ] = False


def with_benchmark_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``command(..., options: BenchmarkOptions)`` for Typer.

    The last parameter is replaced by one keyword option for every field.
    """
    hints = get_type_hints(command, include_extras=True)
    option_hints = get_type_hints(BenchmarkOptions, include_extras=True)
    own = list(inspect.signature(command).parameters.values())[:-1]
    parameters = [p.replace(annotation=hints[p.name]) for p in own]
    for item in fields(BenchmarkOptions):
        default = inspect.Parameter.empty if item.default is MISSING else item.default
        parameters.append(
            inspect.Parameter(
                item.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=option_hints[item.name],
            )
        )

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        arguments = {p.name: values.pop(p.name) for p in own}
        command(**arguments, options=BenchmarkOptions(**values))

    # Typer takes names and defaults from the signature and types from the annotations.
    vars(wrapper)["__signature__"] = inspect.Signature(parameters)
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper
