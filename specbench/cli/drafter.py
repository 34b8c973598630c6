"""``specbench drafter``: train a DSpark drafter for a target, step by step or all at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specbench.cli.drafter_progress import interruptible, open_progress
from specbench.cli.drafter_retrain import average, export, retrain
from specbench.errors import UsageError

app = typer.Typer(
    no_args_is_help=True,
    help="Train a DSpark drafter: generate, features, train, evaluate, export, or all at once.",
)
app.command()(average)
app.command()(export)
app.command()(retrain)

DEFAULT_NUM_TOKENS = 1_000_000

_Model = Annotated[
    str | None, typer.Option(help="Target model: folder or hub id. Default: the embedded one.")
]
_Workdir = Annotated[Path, typer.Option(help="Folder that holds everything made on the way.")]
_EngineArg = Annotated[
    list[str] | None, typer.Option(help="Further vLLM engine argument, key=value; repeatable.")
]
_Device = Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1.")]


@app.command()
def generate(
    workdir: _Workdir,
    num_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Response tokens this seed should have in the end. Default: 1,000,000."
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="Answer the prompts of this JSONL file or workload instead, for testing."
        ),
    ] = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option(help="Of the answers to --prompts; repeatable. Default: 0 and 1."),
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="How many of --prompts. Default: all of a file.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Limit of an answer to --prompts. Default: 256.")
    ] = None,
    seed: Annotated[
        int,
        typer.Option(min=0, help="Another seed adds other prompts; several can run side by side."),
    ] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests in the engine at once.")] = 128,
    model: _Model = None,
    engine_arg: _EngineArg = None,
) -> None:
    """Let the target answer prompts; stop at any time, run again to go on."""
    _check_generate(num_tokens, prompts, (temperature, num_prompts, max_tokens))
    from specbench.engines.config import parse_engine_args
    from specbench.training import answering
    from specbench.training.outside_prompts import DEFAULT_MAX_TOKENS, DEFAULT_TEMPERATURES

    engine_args = parse_engine_args(engine_arg or [])
    engine = answering.EngineChoice(model, batch_size, seed, engine_args)
    unit = "response tokens" if prompts is None else "conversations"
    with open_progress(unit) as on_progress, interruptible():
        if prompts is None:
            summary = answering.answer_training_prompts(
                workdir,
                engine,
                num_tokens=num_tokens or DEFAULT_NUM_TOKENS,
                on_progress=on_progress,
            )
        else:
            summary = answering.answer_outside_prompts(
                workdir,
                engine,
                prompts=prompts,
                temperatures=temperature or DEFAULT_TEMPERATURES,
                num_prompts=num_prompts,
                max_tokens=max_tokens or DEFAULT_MAX_TOKENS,
                on_progress=on_progress,
            )
    typer.echo(str(summary))


def _check_generate(
    num_tokens: int | None, prompts: str | None, of_outside: tuple[object, ...]
) -> None:
    if prompts is None and any(value for value in of_outside):
        raise UsageError("--temperature, --num-prompts and --max-tokens belong to --prompts")
    if prompts is not None and num_tokens is not None:
        raise UsageError("--num-tokens is for training prompts; with --prompts give --num-prompts")


@app.command()
def features(
    workdir: _Workdir,
    model: _Model = None,
    device: _Device = "cpu",
    layer: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Target layer the drafter reads; repeatable. Default: five."),
    ] = None,
    splits: Annotated[str, typer.Option(help="Splits to extract, comma-separated.")] = "train,test",
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Response tokens of each split to stop at.")
    ] = None,
) -> None:
    """Extract the target's hidden states of all responses that are not extracted yet."""
    from specbench.training.recipe import extract

    with open_progress("tokens") as on_progress, interruptible():
        for line in extract(
            workdir,
            model=model,
            device=device,
            layer_ids=layer,
            splits=[split.strip() for split in splits.split(",")],
            max_tokens=max_tokens,
            on_progress=on_progress,
        ):
            typer.echo(line)


@app.command()
def train(
    workdir: _Workdir,
    run: Annotated[str, typer.Option(help="Name of the run; the same name goes on with it.")],
    minutes: Annotated[float | None, typer.Option(help="Train this long.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Train this many passes instead.")] = None,
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
    anchor_probability: Annotated[
        float, typer.Option(help="Chance of a position to start a block.")
    ] = 0.5,
    block_lengths: Annotated[
        str | None,
        typer.Option(help="Chances of lengths 1, 2, ..., comma-separated. Default: mostly whole."),
    ] = None,
    position_decay: Annotated[
        float, typer.Option(help="Weight of a position over the one before it.")
    ] = 0.8,
    kl_share: Annotated[
        float, typer.Option(help="Part of the training over which a KL term fades.")
    ] = 0.25,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, order and anchors.")] = 0,
    model: _Model = None,
    device: _Device = "cpu",
) -> None:
    """Train a drafter on the extracted features; stop at any time, run again to go on."""
    from specbench.training.optimizer import OptimizerSpec
    from specbench.training.recipe import parse_probabilities, train_run
    from specbench.training.starting_drafter import NewDrafter
    from specbench.training.trainer import TrainSpec

    shape = NewDrafter(num_layers, block_size, markov_rank, draft_vocab_size, mask_token_id)
    spec = TrainSpec(
        epochs=epochs,
        minutes=minutes,
        tokens_per_batch=tokens_per_batch,
        anchor_probability=anchor_probability,
        block_length_probabilities=parse_probabilities(block_lengths, block_size),
        position_decay=position_decay,
        kl_share=kl_share,
        optimizer=OptimizerSpec(name=optimizer, learning_rate=learning_rate),
        seed=seed,
    )
    with open_progress("of the training") as on_progress, interruptible():
        folder = train_run(
            workdir,
            run,
            spec,
            shape=shape,
            start_from=start_from,
            model=model,
            device=device,
            on_progress=on_progress,
        )
    typer.echo(f"drafter in {folder}")


@app.command()
def evaluate(
    workdir: _Workdir,
    drafter: Annotated[
        str | None, typer.Option(help="Drafter checkpoint. Default: the embedded one.")
    ] = None,
    split: Annotated[str, typer.Option(help="Which features to evaluate on.")] = "test",
    temperature: Annotated[
        list[float] | None,
        typer.Option(help="Of the responses; repeatable. Default: 0 and 1."),
    ] = None,
    block_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a block. Default: the drafter's.")
    ] = None,
    model: _Model = None,
    device: _Device = "cpu",
    output: Annotated[
        Path | None, typer.Option(help="Write everything as JSON to this file.")
    ] = None,
) -> None:
    """Acceptance and confidence on held-out responses, replayed step by step."""
    from specbench.cli.drafter_tables import print_evaluation
    from specbench.training.recipe import drafter_folder, evaluate_checkpoint
    from specbench.training.retrain import write_evaluation

    with open_progress("responses") as on_progress, interruptible():
        reports = evaluate_checkpoint(
            workdir,
            drafter,
            split=split,
            temperatures=temperature or [0.0, 1.0],
            block_length=block_length,
            model=model,
            device=device,
            on_progress=on_progress,
        )
    print_evaluation(reports)
    if output is not None:
        write_evaluation(output, reports, drafter_folder(drafter, model))
