"""What an engine is started with."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from specbench.cache import cache_dir
from specbench.errors import UsageError

# Engine arguments that have an option of their own; giving them twice would leave it open
# which one counts.
OWN_OPTIONS = {
    "model": "--model",
    "dtype": "--dtype",
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-concurrency",
    "tensor_parallel_size": "--tensor-parallel-size",
    "data_parallel_size": "--data-parallel-size",
    "distributed_executor_backend": "--distributed-executor-backend",
    "trust_remote_code": "--trust-remote-code",
    "speculative_config": "--drafter and --num-speculative-tokens",
    "worker_cls": "the policy options",
}


# Engines for up to 16 requests are alike, so that step costs measured once serve every
# concurrency from 1 to 16.
MIN_NUM_SEQS = 16


def num_seqs_for(max_concurrency: int) -> int:
    """``max_num_seqs`` of the engine that serves this concurrency."""
    return max(max_concurrency, MIN_NUM_SEQS)


@dataclass(frozen=True)
class EngineConfig:
    """One engine process.

    Attributes:
        model: path or hub id; None is the embedded default.
        drafter: path or hub id; None is the default drafter of the default model.
        max_model_len: context length in tokens; None leaves it to the engine.
        max_num_seqs: requests that the engine serves at once.
        engine_args: further arguments, passed on as they are.
        log_file: receives the engine's own log.
        verbose: show that log on the terminal instead.
        num_speculative_tokens: draft slots of a request; None takes 16, or the model drafter's
            block if that is longer (or named by a hub id). The model drafts its own block, or
            as many tokens as there are slots if those are fewer.
        draft_sample_method: "greedy" (every draft token is its drafter's best) or
            "probabilistic" (drafts are sampled at the request's temperature).
        plain: "v1" or "v2" starts vLLM with that model runner and without speculation;
            None starts it with the policy runner.
        plugin_settings: settings of the plugin inside the engine.
    """

    model: str | None
    drafter: str | None
    max_num_seqs: int
    log_file: Path
    dtype: str = "auto"
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    distributed_executor_backend: str | None = None
    engine_args: dict[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False
    verbose: bool = False
    num_speculative_tokens: int | None = None
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    plain: Literal["v1", "v2"] | None = None
    plugin_settings: dict[str, Any] = field(default_factory=dict)


def parse_engine_args(assignments: Sequence[str]) -> dict[str, Any]:
    """Turn ``key=value`` words into engine arguments.

    A value that is valid JSON is taken as such (``0.5``, ``true``, ``{"a": 1}``), anything
    else as text. Dashes in keys are read as underscores.

    Raises:
        UsageError: no ``=``, a key that is no identifier, given twice, or one that has an
            option of its own.
    """
    parsed: dict[str, Any] = {}
    for assignment in assignments:
        raw_key, equals, value = assignment.partition("=")
        key = raw_key.strip().removeprefix("--").replace("-", "_")
        if not equals or not key.isidentifier():
            raise UsageError(f"--engine-arg {assignment!r}: expected key=value")
        if key in OWN_OPTIONS:
            raise UsageError(f"--engine-arg {key}: use {OWN_OPTIONS[key]} instead")
        if key in parsed:
            raise UsageError(f"--engine-arg {key} is given twice")
        parsed[key] = _json_or_text(value)
    return parsed


def default_log_file() -> Path:
    """A new file name under the user's cache folder; the folder is not created here."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return cache_dir() / "logs" / f"engine-{stamp}-{os.getpid()}.log"


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value
