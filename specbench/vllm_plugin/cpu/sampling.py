"""All CPU twins of the V2 runner's sampling kernels, by kernel name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specbench.vllm_plugin.cpu import gumbel, logit_edits, logprobs

OVERRIDES: dict[str, Callable[..., Any]] = {
    **gumbel.OVERRIDES,
    **logit_edits.OVERRIDES,
    **logprobs.OVERRIDES,
}
