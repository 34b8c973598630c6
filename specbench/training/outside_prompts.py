"""Prompts from a file or a workload, answered to test a drafter on what it was not made for."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from specbench.errors import UsageError
from specbench.records import Conversation, Message
from specbench.training.prompts import SOURCE_SHARES, PromptSpec
from specbench.workloads import get_workload
from specbench.workloads.base import FileWorkload

# Greedy, and plain sampling: what a drafter's acceptance is usually stated for.
DEFAULT_TEMPERATURES = (0.0, 1.0)
# As for the chat prompts of training.
DEFAULT_MAX_TOKENS = 256


def outside_source(spec: str) -> str:
    """What the responses to a prompt file or workload are filed under.

    The file's name without its ending; for a workload ``workload-<name>``, as "code-edit" is
    a source of training prompts too.

    Raises:
        UsageError: no such workload, or a file called as a source of training prompts.
    """
    workload = get_workload(spec)
    if not isinstance(workload, FileWorkload):
        return f"workload-{workload.name}"
    source = Path(workload.path).stem
    if source in SOURCE_SHARES:
        raise UsageError(
            f"--prompts {spec}: {source!r} names a source of training prompts; rename the file"
        )
    return source


def outside_stream(source: str) -> str:
    """Name of the stream of responses that a source is written to."""
    return "outside-" + re.sub(r"[^A-Za-z0-9._-]+", "_", source)


def outside_prompts(
    spec: str,
    *,
    temperatures: Sequence[float],
    num_prompts: int | None,
    max_tokens: int,
    seed: int = 0,
) -> list[PromptSpec]:
    """Every prompt at every temperature, for the test split.

    Args:
        spec: what :func:`specbench.workloads.load_workload` takes.
        temperatures: of the answers, 0 or more.
        num_prompts: distinct prompts to take; None takes all of a file, a workload's own
            number.
        max_tokens: limit of each answer.
        seed: of the order they are taken in.

    Raises:
        InputError: the file cannot be used; the message names file and line.
        UsageError: no such workload, or a bad number.
    """
    if bad := [value for value in temperatures if not 0 <= value < float("inf")]:
        raise UsageError(f"--temperature {bad[0]:g}: give 0 or more")
    source = outside_source(spec)
    items = get_workload(spec).items(num_prompts, seed)
    return [
        _prompt(source, item, temperature, max_tokens)
        for item in items
        for temperature in dict.fromkeys(temperatures)
    ]


def _prompt(source: str, item: Conversation, temperature: float, max_tokens: int) -> PromptSpec:
    first, *later = item.turns
    # The text is part of the id: an edited file gives new prompts.
    text = "\0".join([*(message.content for message in item.history), *item.turns])
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return PromptSpec(
        prompt_id=f"{source}/{item.item_id}/{digest}/t{temperature:g}",
        source=source,
        split="test",
        messages=(*item.history, Message("user", first)),
        temperature=temperature,
        max_tokens=max_tokens,
        later_turns=tuple(later),
    )
