"""Start the target and let it answer: training prompts of a seed, or outside prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.engines.model_cache import ModelRef, resolve_model
from specbench.engines.offline import OfflineEngine
from specbench.training.generate import Generator
from specbench.training.outside_prompts import outside_prompts, outside_source, outside_stream
from specbench.training.prompts import PromptSpec, iter_prompts
from specbench.training.responses import ResponseWriter, only_writer

RESPONSES_FOLDER = "responses"

OnProgress = Callable[[float, float], None]


@dataclass(frozen=True)
class EngineChoice:
    """The engine that answers.

    Attributes:
        model: target; None for the embedded one.
        batch_size: requests in the engine at once.
        seed: of sampling, of the training prompts and of the order of outside ones.
        engine_args: further vLLM engine arguments.
    """

    model: str | None
    batch_size: int
    seed: int
    engine_args: dict[str, Any]


@dataclass(frozen=True)
class AnsweringSummary:
    """What a stream of responses holds after a call.

    Attributes:
        stream: its name.
        folder: where it is.
        num_tokens: response tokens, loops removed.
        num_loop_tokens: tokens removed as loops, in all calls that counted them.
    """

    stream: str
    folder: Path
    num_tokens: int
    num_loop_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.num_tokens:,} response tokens of {self.stream} in {self.folder} "
            f"({self.num_loop_tokens:,} tokens of loops left out)"
        )


def answer_training_prompts(
    workdir: Path, engine: EngineChoice, *, num_tokens: int, on_progress: OnProgress
) -> AnsweringSummary:
    """Add to ``workdir/responses`` until the seed has so many response tokens.

    Args:
        on_progress: called with (response tokens, response tokens wanted).

    Raises:
        EngineFailure, EnvironmentProblem, InputError, UsageError: as the parts say.
    """

    def tell(done_tokens: int, _: int) -> None:
        on_progress(done_tokens, num_tokens)

    def is_complete(writer: ResponseWriter) -> bool:
        return writer.num_tokens >= num_tokens

    prompts = iter_prompts(engine.seed)
    return _answer(workdir, engine, str(engine.seed), prompts, num_tokens, is_complete, tell)


def answer_outside_prompts(
    workdir: Path,
    engine: EngineChoice,
    *,
    prompts: str,
    temperatures: Sequence[float],
    num_prompts: int | None,
    max_tokens: int,
    on_progress: OnProgress,
) -> AnsweringSummary:
    """Answer a file's or a workload's prompts into the test split of ``workdir/responses``.

    Further turns of a prompt follow with the target's own answers in between.

    Args:
        prompts: a path or a workload name.
        on_progress: called with (conversations finished, conversations in all).

    Raises:
        EngineFailure, EnvironmentProblem, InputError, UsageError: as the parts say.
    """
    specs = outside_prompts(
        prompts,
        temperatures=temperatures,
        num_prompts=num_prompts,
        max_tokens=max_tokens,
        seed=engine.seed,
    )

    def tell(_: int, num_finished: int) -> None:
        on_progress(num_finished, len(specs))

    def is_complete(writer: ResponseWriter) -> bool:
        return all(writer.done.issuperset(spec.all_ids) for spec in specs)

    stream = outside_stream(outside_source(prompts))
    return _answer(workdir, engine, stream, specs, None, is_complete, tell)


def _answer(
    workdir: Path,
    choice: EngineChoice,
    stream: str,
    prompts: Iterable[PromptSpec],
    num_tokens: int | None,
    is_complete: Callable[[ResponseWriter], bool],
    tell: Callable[[int, int], None],
) -> AnsweringSummary:
    target = resolve_model(choice.model)
    folder = workdir / RESPONSES_FOLDER
    with only_writer(folder, stream):
        writer = ResponseWriter(
            folder, stream=stream, model=model_name(target), fingerprint=target.fingerprint
        )
        # Starting an engine takes longer than finding that there is nothing to do.
        if not is_complete(writer):
            engine = OfflineEngine(
                target,
                max_num_seqs=choice.batch_size,
                seed=choice.seed,
                engine_args=choice.engine_args,
            )
            Generator(engine, writer, prompts, seed=choice.seed, batch_size=choice.batch_size).run(
                num_tokens, tell
            )
    return AnsweringSummary(stream, folder, writer.num_tokens, writer.num_loop_tokens)


def model_name(target: ModelRef) -> str:
    """How the response folder names its target."""
    return "default" if target.is_default else target.path_or_id
