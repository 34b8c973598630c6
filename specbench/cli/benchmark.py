"""What ``run`` and ``compare`` have in common: check, measure, write, show."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from specbench.cli.engine_start import CalibrationSource, CostSource, EngineNeeds, start_engine
from specbench.cli.interrupt import InterruptGuard
from specbench.cli.options import BenchmarkOptions
from specbench.errors import Interrupted, SpecbenchError, UsageError
from specbench.records import Conversation, RunSpec, SamplingSpec

if TYPE_CHECKING:
    from specbench.bench.events import OnEvent
    from specbench.bench.session import Outcome
    from specbench.engines.config import EngineConfig
    from specbench.results.document import ResultDocument

# Name recorded for a model or drafter that was not chosen, until the engine names it.
DEFAULT_NAME = "default"


@dataclass(frozen=True)
class Benchmark:
    """A checked request to measure: nothing in it can fail for lack of a name or a path."""

    spec: RunSpec
    conversations: tuple[Conversation, ...]
    engine_config: EngineConfig
    needs: EngineNeeds


def execute(policies: Sequence[str], options: BenchmarkOptions) -> None:
    """Measure ``policies`` and show the result.

    Raises:
        SpecbenchError: see the subclasses; after an interruption or an engine failure it
            is raised only when what was measured has been written and shown.
    """
    from specbench.bench.report import build_document
    from specbench.cli.progress import open_progress
    from specbench.results.environment import describe_environment

    benchmark = prepare(policies, options)
    with open_progress(enabled=not options.no_progress, spec=benchmark.spec) as on_event:
        outcome = _measure(benchmark, on_event)
    stopped_by = outcome.stopped_by
    if stopped_by is not None and not outcome.measured_anything:
        if isinstance(stopped_by, Interrupted):
            raise Interrupted("stopped before anything was measured")
        raise stopped_by
    spec = _named(benchmark.spec, outcome)
    environment = describe_environment(outcome.engine_description)
    reason = None if stopped_by is None else str(stopped_by)
    document = build_document(spec, outcome.rounds, environment, reason)
    _show_and_write(document, outcome, options)
    if stopped_by is not None:
        raise _explained(stopped_by, options)


def prepare(policies: Sequence[str], options: BenchmarkOptions) -> Benchmark:
    """Check everything that can be checked without an engine, cheapest first.

    Raises:
        UsageError: unknown policy or workload, unusable path, option that does not fit.
        InputError: unusable workload file.
    """
    from specbench.bench.plan import limit_outputs, plan_rounds
    from specbench.engines.config import parse_engine_args
    from specbench.results.store import check_output_path, check_records_directory
    from specbench.workloads import load_workload

    sampling = _sampling(options)
    engine_args = parse_engine_args(options.engine_arg or [])
    if options.output is not None:
        check_output_path(options.output)
    if options.records is not None:
        check_records_directory(options.records)
    needs = _check_policies(policies, options)
    conversations = load_workload(options.workload, options.num_prompts, options.seed)
    if options.max_tokens is not None:
        conversations = limit_outputs(conversations, options.max_tokens)
    spec = _run_spec(policies, conversations, sampling, engine_args, options)
    plan_rounds(
        spec.policies,
        conversations,
        num_rounds=spec.rounds,
        warmup_prompts=spec.warmup_prompts,
        seed=spec.seed,
    )
    config = _engine_config(options, engine_args)
    return Benchmark(spec, tuple(conversations), config, needs)


def _run_spec(
    policies: Sequence[str],
    conversations: Sequence[Conversation],
    sampling: SamplingSpec,
    engine_args: dict[str, Any],
    options: BenchmarkOptions,
) -> RunSpec:
    from specbench.bench.plan import label_policies

    warmup = options.max_concurrency if options.warmup_prompts is None else options.warmup_prompts
    # More warm-ups than prompts would only repeat prompts.
    warmup = min(warmup, len(conversations))
    return RunSpec(
        policies=label_policies(policies),
        workload=options.workload,
        max_concurrency=options.max_concurrency,
        num_prompts=len(conversations),
        rounds=options.rounds,
        sampling=sampling,
        seed=options.seed,
        model=options.model or DEFAULT_NAME,
        drafter=options.drafter or (None if options.model else DEFAULT_NAME),
        engine_args=engine_args,
        warmup_prompts=warmup,
    )


def _engine_config(options: BenchmarkOptions, engine_args: dict[str, Any]) -> EngineConfig:
    from specbench.engines.config import EngineConfig, default_log_file, num_seqs_for

    return EngineConfig(
        model=options.model,
        drafter=options.drafter,
        max_num_seqs=num_seqs_for(options.max_concurrency),
        log_file=options.log_file or default_log_file(),
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        tensor_parallel_size=options.tensor_parallel_size,
        data_parallel_size=options.data_parallel_size,
        distributed_executor_backend=options.distributed_executor_backend,
        engine_args=engine_args,
        trust_remote_code=options.trust_remote_code,
        verbose=options.verbose,
        num_speculative_tokens=options.num_speculative_tokens,
        draft_sample_method=options.draft_sample_method.value,
    )


def _cost_source(options: BenchmarkOptions) -> CostSource:
    if options.costs is None:
        return CostSource()
    from specbench.costs import read_table

    return CostSource(read_table(options.costs), options.costs)


def _sampling(options: BenchmarkOptions) -> SamplingSpec:
    for name, value in (
        ("--temperature", options.temperature),
        ("--top-p", options.top_p),
        ("--min-p", options.min_p),
    ):
        if not math.isfinite(value):
            raise UsageError(f"{name} must be a finite number, not {value}")
    if options.top_p == 0:
        raise UsageError("--top-p 0 leaves no token to choose; use a value above 0")
    sampling = SamplingSpec(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        ignore_eos=options.ignore_eos,
        seed=options.seed,
    )
    if options.max_tokens is None:
        return sampling
    return replace(sampling, max_tokens=options.max_tokens)


def _check_policies(policies: Sequence[str], options: BenchmarkOptions) -> EngineNeeds:
    """What the policies need; raises UsageError where the options rule one out."""
    from specbench.engines.model_cache import NO_DRAFTER
    from specbench.policies import make_policy

    without_drafter = options.drafter == NO_DRAFTER or (options.model and not options.drafter)
    made = {name: make_policy(name) for name in policies}
    for name, policy in made.items():
        if policy.drafter.uses_model and without_drafter:
            raise UsageError(
                f"policy {name!r} drafts with a model, but there is no drafter: give one with "
                "--drafter (only the default model has a default one)"
            )
    weighs_costs = any(policy.needs_costs for policy in made.values())
    calibrated = [name for name, policy in made.items() if policy.needs_calibration]
    if options.calibration is not None:
        from specbench.estimators.calibration_store import load_calibration

        # Read even if no policy asks for it: it may be unusable.
        load_calibration(options.calibration)
    return EngineNeeds(
        # A table that was named is read even if no policy weighs costs: it may be unusable.
        costs=_cost_source(options) if weighs_costs or options.costs is not None else None,
        calibration=CalibrationSource(calibrated[0], options.calibration) if calibrated else None,
    )


def _measure(benchmark: Benchmark, on_event: OnEvent) -> Outcome:
    from specbench.bench.session import run_session

    with InterruptGuard() as guard:

        async def session() -> Outcome:
            stop = asyncio.Event()
            guard.attach(stop)
            return await run_session(
                lambda: start_engine(benchmark.engine_config, benchmark.needs, on_event),
                benchmark.spec,
                benchmark.conversations,
                on_event=on_event,
                stop=stop,
            )

        try:
            return asyncio.run(session())
        except KeyboardInterrupt:
            raise Interrupted("stopped before anything was measured") from None


def _named(spec: RunSpec, outcome: Outcome) -> RunSpec:
    """The spec with model and drafter as the engine resolved them."""
    engine = outcome.engine_description
    return replace(
        spec,
        model=str(engine.get("model") or spec.model),
        drafter=engine.get("drafter", spec.drafter),
    )


def _show_and_write(document: ResultDocument, outcome: Outcome, options: BenchmarkOptions) -> None:
    from specbench.cli.tables import print_result
    from specbench.results.store import write_result

    # The file first: a closed pipe must not cost the result.
    if options.output is not None:
        write_result(options.output, document)
    if options.records is not None:
        from specbench.results.parquet import write_records

        write_records(options.records, outcome.rounds)
    if options.json_output:
        json.dump(document, sys.stdout, indent=2, allow_nan=False)
        sys.stdout.write("\n")
    else:
        print_result(document)


def _explained(stopped_by: SpecbenchError, options: BenchmarkOptions) -> SpecbenchError:
    """The error that ended the run, with what became of the measurements."""
    kept = "what was measured is shown above"
    if options.output is not None:
        kept = f"what was measured is in {options.output}, marked as partial"
    return type(stopped_by)(f"{stopped_by}; {kept}")
