"""Average the weights of runs that started from one checkpoint.

Runs of other seeds over the same data need nothing from each other while they train, so they
use cores side by side without the cost of splitting each step; their mean is usually better
than any of them (Wortsman et al. 2022, arXiv:2203.05482).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from specbench.cache import write_bytes_atomically, write_text_atomically
from specbench.errors import InputError, UsageError
from specbench.training.drafter_checkpoint import CONFIG_NAME, WEIGHTS_NAME
from specbench.training.run_record import read_record
from specbench.training.training_state import DRAFTER_FOLDER

AVERAGE_FILE = "average.json"
FORMAT_VERSION = 1


def average_runs(runs: Sequence[Path], into: Path) -> Path:
    """Write the mean of finished runs' drafters as the drafter of another run folder.

    Floating-point tensors are averaged in float32 and keep their dtype; integer ones (the
    draft vocabulary) must be equal.

    Args:
        runs: run folders, at least two.
        into: run folder to make; not one of them.

    Returns:
        The averaged drafter's folder.

    Raises:
        UsageError: fewer than two runs, runs of other shapes, vocabularies or origins.
        InputError: a run without a finished drafter.
        EnvironmentProblem: ``into`` cannot be written.
    """
    if len(set(runs)) < 2 or into in runs:
        raise UsageError("name at least two different runs to average, and another name for it")
    origins = {_origin(run) for run in runs}
    if len(origins) > 1:
        raise UsageError(
            f"the runs {', '.join(run.name for run in runs)} did not start from one checkpoint; "
            "only runs that did lie close enough to be averaged"
        )
    configs = {_read_config(run) for run in runs}
    if len(configs) > 1:
        raise UsageError("the runs' drafters have different shapes; average runs of one shape")
    tensors = [_read_weights(run) for run in runs]
    mean = {name: _mean(name, [each.get(name) for each in tensors]) for name in tensors[0]}
    folder = into / DRAFTER_FOLDER
    write_text_atomically(folder / CONFIG_NAME, configs.pop())
    write_bytes_atomically(folder / WEIGHTS_NAME, save(mean, metadata={"format": "pt"}))
    facts = {"format_version": FORMAT_VERSION, "average_of": [run.name for run in runs]}
    write_text_atomically(into / AVERAGE_FILE, json.dumps(facts, indent=1) + "\n")
    return folder


def averaged_runs(run: Path) -> tuple[str, ...] | None:
    """Names of the runs that this one is the average of; None for a run of its own.

    Raises:
        InputError: the file that says so is damaged.
    """
    path = run / AVERAGE_FILE
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["average_of"]
        return tuple(str(name) for name in names)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"{path} is damaged; average the runs again") from None


def _origin(run: Path) -> str | None:
    record = read_record(run)
    started_from = None if record is None else record.started_from
    if started_from is None:
        # New drafters of other seeds are far apart from the first step on.
        return f"new drafter of {run.name}"
    return started_from["fingerprint"]


def _read_config(run: Path) -> str:
    path = run / DRAFTER_FOLDER / CONFIG_NAME
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        raise InputError(f"{run} holds no finished drafter; finish its training first") from None


def _read_weights(run: Path) -> dict[str, torch.Tensor]:
    path = run / DRAFTER_FOLDER / WEIGHTS_NAME
    try:
        return load_file(path)
    except (OSError, SafetensorError) as problem:
        raise InputError(f"{path}: cannot be read as drafter weights: {problem}") from problem


def _mean(name: str, parts: list[torch.Tensor | None]) -> torch.Tensor:
    known = [part for part in parts if part is not None]
    first = known[0]
    if len(known) < len(parts) or any(part.shape != first.shape for part in known):
        raise UsageError(f"the runs' drafters differ in {name}; average runs of one shape")
    if not first.is_floating_point():
        if not all(torch.equal(part, first) for part in known):
            raise UsageError("the runs' drafters propose from different tokens (d2t differs)")
        return first
    return torch.stack([part.float() for part in known]).mean(dim=0).to(first.dtype)
