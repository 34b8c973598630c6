"""How long the n-gram lookup takes beside vLLM's own, on this machine.

    python kernels/benchmarks/ngram_lookup.py --output ngram-lookup.json

A program, not a part of the package: nothing imports it. Each case is a batch of texts of one
length. All sides look up the same batch in every round, in alternating order, so that what
disturbs the machine disturbs all of them; a round's sample is the mean of enough calls to last
some milliseconds. Reported are the medians over rounds, and our time as a ratio to theirs
(geometric mean of the rounds' ratios, 95% interval; below 1 ours is faster).

Sides:
    specbench: ``ngram_lookup`` on the chosen device, all outputs included.
    vllm-numba: vLLM's ``NgramProposer`` on the host, its Python lists included. Of equal matches
        it takes the earliest, we the latest; the search is the same.
    vllm-gpu: vLLM's Triton n-gram drafter of the V2 runner, with ``--device cuda`` only.

Texts:
    prose: tokens as frequent as words (1 / rank), and the last 12 tokens copied to the middle.
    loop: a cycle of 7 tokens, where every seventh position matches: the worst case.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from specbench.cache import write_text_atomically
from specbench.cli.failures import report_failure
from specbench.errors import EngineFailure, EnvironmentProblem, SpecbenchError, UsageError
from specbench.kernels.ngram_lookup import ngram_lookup
from specbench.results.environment import describe_environment
from specbench.stats import paired_ratio

OURS = "specbench"
TEXTS = ("prose", "loop")
# A sample lasts at least this long: thousands of times the clock's resolution.
MIN_SAMPLE_MS = 5.0
MAX_CALLS_PER_SAMPLE = 1000
VOCABULARY_SIZE = 49152  # the default model's
NUM_COPIED_TOKENS = 12  # longer than max_n's default: a full match
NUM_CYCLE_TOKENS = 7
# A pipe has no width of its own; the widest table, with three sides, needs this.
PIPED_WIDTH = 120

Lookup = Callable[[], Any]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Settings:
    """What is the same in all cases; n-gram lengths and drafts in tokens."""

    min_n: int
    max_n: int
    num_tokens: int
    rounds: int
    seed: int
    device: str


@dataclass(frozen=True)
class Case:
    """One batch: what its texts are like, their length in tokens, and how many there are."""

    text: str
    context_tokens: int
    num_requests: int


def make_texts(case: Case, seed: int) -> torch.Tensor:
    """[num_requests, context_tokens] int32 on the CPU; the same for the same case and seed."""
    shape = (case.num_requests, case.context_tokens)
    if case.text == "loop":
        cycle = torch.arange(case.context_tokens, dtype=torch.int32) % NUM_CYCLE_TOKENS
        return cycle.expand(shape).contiguous()
    rng = np.random.default_rng([seed, *shape])
    weights = 1.0 / np.arange(1, VOCABULARY_SIZE + 1)
    tokens = rng.choice(VOCABULARY_SIZE, size=shape, p=weights / weights.sum())
    middle = case.context_tokens // 2
    copied = min(NUM_COPIED_TOKENS, middle)
    tokens[:, middle - copied : middle] = tokens[:, case.context_tokens - copied :]
    return torch.from_numpy(tokens.astype(np.int32))


def our_side(texts: torch.Tensor, settings: Settings) -> Lookup:
    """The lookup of this project; a call returns its NgramMatches."""
    token_ids = texts.to(settings.device)
    num_reqs, length = texts.shape
    lengths = torch.full((num_reqs,), length, dtype=torch.int32, device=settings.device)
    rows = torch.arange(num_reqs, dtype=torch.int32, device=settings.device)
    return lambda: ngram_lookup(
        token_ids,
        lengths,
        min_n=settings.min_n,
        max_n=settings.max_n,
        num_tokens=settings.num_tokens,
        rows=rows,
    )


def vllm_config(texts: torch.Tensor, settings: Settings) -> Any:
    """The few settings that vLLM's n-gram drafters read."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            prompt_lookup_min=settings.min_n,
            prompt_lookup_max=settings.max_n,
            num_speculative_tokens=settings.num_tokens,
        ),
        # Room for a whole proposal: vLLM proposes nothing beyond the longest sequence.
        model_config=SimpleNamespace(max_model_len=texts.shape[1] + settings.num_tokens),
        scheduler_config=SimpleNamespace(max_num_seqs=max(texts.shape[0], 1)),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )


def vllm_numba_side(texts: torch.Tensor, settings: Settings) -> Lookup:
    """vLLM's proposer on the host; a call returns a list of drafts for each request."""
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    proposer = NgramProposer(vllm_config(texts, settings))
    num_reqs, length = texts.shape
    sampled = [[0]] * num_reqs  # only whether anything was sampled is looked at
    lengths = np.full(num_reqs, length, dtype=np.int32)
    token_ids = texts.numpy()
    return lambda: proposer.propose(settings.num_tokens, sampled, lengths, token_ids)


def vllm_gpu_side(texts: torch.Tensor, settings: Settings) -> Lookup:
    """vLLM's Triton drafter; a call returns [num_requests, num_tokens] drafts."""
    from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

    device = torch.device(settings.device)
    num_reqs, length = texts.shape
    lengths = torch.full((num_reqs,), length, dtype=torch.int32, device=device)
    states = SimpleNamespace(
        all_token_ids=SimpleNamespace(gpu=texts.to(device)), total_len=SimpleNamespace(gpu=lengths)
    )
    drafter = NgramGPUSpeculator(vllm_config(texts, settings), device, states)
    rows = torch.arange(num_reqs, dtype=torch.int32, device=device)
    batch = SimpleNamespace(num_reqs=num_reqs, idx_mapping=rows)
    num_sampled = torch.ones(num_reqs, dtype=torch.int32, device=device)
    last_sampled = torch.zeros(num_reqs, 1, dtype=torch.int64, device=device)
    unused: tuple[None, ...] = (None, None, None, None)
    return lambda: drafter.propose(
        batch, *unused, num_sampled, None, last_sampled, None, None, None
    )


def make_sides(texts: torch.Tensor, settings: Settings) -> dict[str, Lookup]:
    """All sides that can run here, warmed up and checked to find the same.

    Raises:
        EngineFailure: a side proposes for other requests, or (of those that choose the same
            occurrence) other tokens.
    """
    sides = {OURS: our_side(texts, settings), "vllm-numba": vllm_numba_side(texts, settings)}
    matches = sides[OURS]()
    found = (matches.counts > 0).tolist()
    if [bool(drafts) for drafts in sides["vllm-numba"]()] != found:
        raise EngineFailure("vllm-numba proposes for other requests than specbench: not compared")
    if settings.device == "cuda":
        sides["vllm-gpu"] = vllm_gpu_side(texts, settings)
        drafts = sides["vllm-gpu"]()
        if not torch.equal(drafts[matches.drafts >= 0], matches.drafts[matches.drafts >= 0]):
            raise EngineFailure("vllm-gpu proposes other tokens than specbench: not compared")
    return sides


def time_ms(lookup: Lookup, num_calls: int, device: str) -> float:
    """Mean duration of a call, until the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(num_calls):
        lookup()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / num_calls


def measure(case: Case, settings: Settings) -> dict[str, Any]:
    """Time all sides on one case; a JSON object."""
    sides = make_sides(make_texts(case, settings.seed), settings)
    num_calls = {}
    for name, lookup in sides.items():
        # The quickest of three: an interruption here would make every sample a short one.
        once_ms = min(time_ms(lookup, 1, settings.device) for _ in range(3))
        enough = math.ceil(MIN_SAMPLE_MS / once_ms)
        num_calls[name] = min(max(enough, 1), MAX_CALLS_PER_SAMPLE)
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for round_index in range(settings.rounds):
        order = list(sides) if round_index % 2 == 0 else list(reversed(sides))
        for name in order:
            samples[name].append(time_ms(sides[name], num_calls[name], settings.device))
    ratios = {name: paired_ratio(samples[OURS], samples[name]) for name in samples if name != OURS}
    return {
        **asdict(case),
        "median_ms": {name: statistics.median(values) for name, values in samples.items()},
        "ratio_ours_to": {name: asdict(ratio) for name, ratio in ratios.items() if ratio},
        "samples_ms": samples,
    }


def result_table(results: Sequence[dict[str, Any]], settings: Settings) -> Table:
    """One row a case: median times, and ratios with their interval."""
    others = [name for name in results[0]["median_ms"] if name != OURS]
    table = Table(
        title=f"n-gram lookup on {settings.device}: {settings.min_n} to {settings.max_n} tokens, "
        f"{settings.num_tokens} proposed, {settings.rounds} rounds"
    )
    for header in ("text", "context", "requests", f"{OURS} ms"):
        table.add_column(header, justify="left" if header == "text" else "right")
    for name in others:
        table.add_column(f"{name} ms", justify="right")
        table.add_column("ratio [95%]", justify="right")
    for result in results:
        cells = [
            result["text"],
            f"{result['context_tokens']:,}",
            str(result["num_requests"]),
            f"{result['median_ms'][OURS]:.3f}",
        ]
        for name in others:
            cells += [f"{result['median_ms'][name]:.3f}", ratio_text(result["ratio_ours_to"][name])]
        table.add_row(*cells)
    return table


def ratio_text(ratio: dict[str, Any]) -> str:
    """A ratio with its interval; one round has none."""
    if ratio["ci95"] is None:
        return f"{ratio['value']:.2f}"
    low, high = ratio["ci95"]
    return f"{ratio['value']:.2f} [{low:.2f}, {high:.2f}]"


def parse_sizes(option: str, text: str, smallest: int) -> list[int]:
    """Whole numbers separated by commas.

    Raises:
        UsageError: something else, or a number below ``smallest``.
    """
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{option} {text!r}: give whole numbers separated by commas") from None
    if min(sizes) < smallest:
        raise UsageError(f"{option} {text!r}: {min(sizes)} is too small, at least {smallest}")
    return sizes


def choose_device(asked: str) -> str:
    """``asked``, or what there is.

    Raises:
        UsageError: another name than cpu, cuda or auto.
        EnvironmentProblem: cuda was asked for and torch sees none.
    """
    if asked not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device {asked!r}: cpu, cuda or auto")
    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise EnvironmentProblem("torch sees no CUDA device here; use --device cpu")
    return "cuda" if available and asked != "cpu" else "cpu"


@app.command(help="Time the n-gram lookup beside vLLM's own on this machine.")
def main(
    contexts: Annotated[str, typer.Option(help="Text lengths in tokens.")] = "1024,8192,32768",
    requests: Annotated[str, typer.Option(help="Requests per batch.")] = "1,16,64,256",
    min_n: Annotated[int, typer.Option(min=1, help="Shortest match in tokens.")] = 2,
    max_n: Annotated[int, typer.Option(min=1, help="Longest match in tokens.")] = 8,
    num_tokens: Annotated[int, typer.Option(min=1, help="Longest proposal in tokens.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 7,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the texts.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda if there.")] = "auto",
    output: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """Measure every case, print a table, write the JSON file."""
    if max_n < min_n:
        raise UsageError(f"--max-n {max_n} is below --min-n {min_n}")
    # A text of two tokens is the shortest that can repeat anything.
    lengths = parse_sizes("--contexts", contexts, 2)
    batch_sizes = parse_sizes("--requests", requests, 1)
    settings = Settings(min_n, max_n, num_tokens, rounds, seed, choose_device(device))
    cases = [Case(text, n, size) for text in TEXTS for n in lengths for size in batch_sizes]
    progress = Console(stderr=True)
    results = [measure(case, settings) for case in track(cases, "measuring", console=progress)]
    console = Console()
    console = console if console.is_terminal else Console(width=PIPED_WIDTH)
    console.print(result_table(results, settings))
    if output is not None:
        document = {
            "benchmark": "ngram-lookup",
            "version": 1,
            "settings": asdict(settings),
            "num_threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if settings.device == "cuda" else None,
            "environment": describe_environment({}),
            "cases": results,
        }
        write_text_atomically(output, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    try:
        app()
    except (SpecbenchError, ModuleNotFoundError, KeyboardInterrupt) as problem:
        sys.exit(report_failure(problem))
