"""``specbench drafter retrain`` and ``export``: all steps in one command, and the result."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbench.cli.drafter_progress import interruptible, open_progress
from specbench.errors import UsageError

if TYPE_CHECKING:
    from specbench.training.trainer import TrainSpec

# A small version: minutes on two cores, enough to see that everything works.
SMALL_NUM_TOKENS = 30_000
SMALL_MINUTES = 2.0
# Workloads that a comparison is usually made on.
DEFAULT_PROMPTS = ("chat", "code-edit")
DEFAULT_NUM_PROMPTS = 8

_Model = Annotated[
    str | None, typer.Option(help="Target model: folder or hub id. Default: the embedded one.")
]
_MaxMb = Annotated[
    float | None,
    typer.Option(
        min=0.0, help="Most megabytes of weights. Default: 60 for the embedded target, else none."
    ),
]
_Licence = Annotated[
    str | None, typer.Option(help="Licence of the weights, for the provenance file.")
]


def export(
    workdir: Annotated[Path, typer.Option(help="Folder of the recipe.")],
    run: Annotated[str, typer.Option(help="Name of the training run.")],
    output: Annotated[Path, typer.Option(help="Folder to write; its name becomes the drafter's.")],
    evaluation: Annotated[
        Path | None,
        typer.Option(help="What `drafter evaluate --output` wrote. Default: the run's own."),
    ] = None,
    model: _Model = None,
    max_mb: _MaxMb = None,
    licence: _Licence = None,
) -> None:
    """Copy a trained drafter to a folder and write down where it comes from."""
    from specbench.training.export import ExportRequest, export_drafter

    request = ExportRequest(workdir, run, output, evaluation, model, max_mb, licence)
    typer.echo(f"drafter and its provenance in {export_drafter(request)}")


def average(
    workdir: Annotated[Path, typer.Option(help="Folder of the recipe.")],
    run: Annotated[list[str], typer.Option(help="A finished run; give it for each.")],
    into: Annotated[str, typer.Option(help="Name of the run to write the mean to.")],
) -> None:
    """Average the weights of runs that started from one checkpoint."""
    from specbench.training.averaging import average_runs
    from specbench.training.recipe import run_folder

    folder = average_runs([run_folder(workdir, name) for name in run], run_folder(workdir, into))
    typer.echo(f"averaged drafter in {folder}")


def retrain(
    workdir: Annotated[Path, typer.Option(help="Folder that holds everything made on the way.")],
    num_tokens: Annotated[
        int, typer.Option(min=1, help="Response tokens to generate.")
    ] = SMALL_NUM_TOKENS,
    minutes: Annotated[
        float | None, typer.Option(help="Train this long. Default: 2, or by --epochs.")
    ] = None,
    epochs: Annotated[float | None, typer.Option(help="Train this many passes instead.")] = None,
    run: Annotated[str, typer.Option(help="Name of the training run.")] = "retrain",
    output: Annotated[
        Path | None, typer.Option(help="Folder of the result. Default: export/RUN in --workdir.")
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(help="Test prompts: JSONL file or workload; repeatable. Default: workloads."),
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="To test at; repeatable. Default: 0 and 1.")
    ] = None,
    num_prompts: Annotated[
        int, typer.Option(min=1, help="Prompts taken of each test set.")
    ] = DEFAULT_NUM_PROMPTS,
    max_tokens: Annotated[int, typer.Option(min=1, help="Limit of a test answer.")] = 256,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts, sampling and training.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests in the engine at once.")] = 128,
    layer: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Target layer the drafter reads; repeatable. Default: five."),
    ] = None,
    start_from: Annotated[
        Path | None, typer.Option(help="Drafter checkpoint to start from. Default: a new one.")
    ] = None,
    num_layers: Annotated[int, typer.Option(min=1, help="Layers of a new drafter.")] = 2,
    block_size: Annotated[int, typer.Option(min=1, help="Block of a new drafter.")] = 7,
    markov_rank: Annotated[int, typer.Option(min=1, help="Markov rank of a new drafter.")] = 64,
    draft_vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens the drafter can propose. Default: 12288.")
    ] = None,
    mask_token_id: Annotated[
        int | None,
        typer.Option(min=0, help="A token that never occurs in text. Default: an unused one."),
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1.5e-3,
    optimizer: Annotated[str, typer.Option(help="muon or adamw.")] = "muon",
    tokens_per_batch: Annotated[int, typer.Option(min=1, help="Tokens of a step.")] = 4096,
    block_lengths: Annotated[
        str | None,
        typer.Option(help="Chances of lengths 1, 2, ..., comma-separated. Default: mostly whole."),
    ] = None,
    model: _Model = None,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda, cuda:1.")] = "cpu",
    engine_arg: Annotated[
        list[str] | None, typer.Option(help="Further vLLM engine argument, key=value; repeatable.")
    ] = None,
    max_mb: _MaxMb = None,
    licence: _Licence = None,
) -> None:
    """Generate, extract, train, evaluate and export; stop at any time, run again to go on."""
    from specbench.cli.drafter_tables import print_evaluation
    from specbench.engines.config import parse_engine_args
    from specbench.training.answering import EngineChoice
    from specbench.training.export import ExportRequest
    from specbench.training.outside_prompts import DEFAULT_TEMPERATURES
    from specbench.training.retrain import OutsideSets, RetrainPlan
    from specbench.training.retrain import retrain as do_retrain
    from specbench.training.starting_drafter import NewDrafter

    export_to = output or workdir / "export" / run
    plan = RetrainPlan(
        engine=EngineChoice(model, batch_size, seed, parse_engine_args(engine_arg or [])),
        num_tokens=num_tokens,
        outside=OutsideSets(
            prompts or DEFAULT_PROMPTS,
            temperature or DEFAULT_TEMPERATURES,
            num_prompts,
            max_tokens,
        ),
        layer_ids=layer,
        train=_train_spec(
            minutes,
            epochs,
            tokens_per_batch,
            block_lengths,
            block_size,
            optimizer,
            learning_rate,
            seed,
        ),
        shape=NewDrafter(num_layers, block_size, markov_rank, draft_vocab_size, mask_token_id),
        start_from=start_from,
        device=device,
        export=ExportRequest(workdir, run, export_to, model=model, max_mb=max_mb, licence=licence),
    )
    with interruptible():
        print_evaluation(do_retrain(plan, typer.echo, open_progress))


def _train_spec(
    minutes: float | None,
    epochs: float | None,
    tokens_per_batch: int,
    block_lengths: str | None,
    block_size: int,
    optimizer: str,
    learning_rate: float,
    seed: int,
) -> TrainSpec:
    from specbench.training.optimizer import OptimizerSpec
    from specbench.training.recipe import parse_probabilities
    from specbench.training.trainer import TrainSpec

    if minutes is not None and epochs is not None:
        raise UsageError("give either --epochs or --minutes of training, and not both")
    if epochs is None and minutes is None:
        minutes = SMALL_MINUTES
    return TrainSpec(
        epochs=epochs,
        minutes=minutes,
        tokens_per_batch=tokens_per_batch,
        block_length_probabilities=parse_probabilities(block_lengths, block_size),
        optimizer=OptimizerSpec(name=optimizer, learning_rate=learning_rate),
        seed=seed,
    )
