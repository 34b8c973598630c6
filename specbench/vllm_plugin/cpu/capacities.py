"""Fixed-size buffers of the V2 sampler: requests that overflow them are refused in time.

The V2 runner checks these sizes when the request reaches the worker, where the exception
takes the whole engine down. Here the same sizes are checked at submission.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Constants of vllm/v1/worker/gpu/sample/logit_bias.py, which only workers may import; a
# test holds them equal.
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_LOGIT_BIAS_TOKENS = 1024
MAX_STOP_TOKEN_IDS = 128


def check_capacities(params: Any) -> None:
    """Raise VLLMValidationError (status 400) if a parameter does not fit its buffer."""
    from vllm import envs
    from vllm.exceptions import VLLMValidationError

    stop_token_ids = params.all_stop_token_ids if params.min_tokens > 0 else ()
    bad_words = params.bad_words_token_ids or ()
    sizes = (
        ("allowed_token_ids", len(params.allowed_token_ids or ()), MAX_ALLOWED_TOKEN_IDS),
        ("logit_bias", len(params.logit_bias or ()), MAX_LOGIT_BIAS_TOKENS),
        ("stop_token_ids", len(stop_token_ids), MAX_STOP_TOKEN_IDS),
        ("bad_words", len(bad_words), envs.VLLM_MAX_NUM_BAD_WORDS),
        ("bad_words", sum(map(len, bad_words)), envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS),
    )
    for parameter, size, limit in sizes:
        if size > limit:
            raise VLLMValidationError(
                f"{parameter} has {size} entries; the V2 model runner takes at most {limit}",
                parameter=parameter,
            )


def then_check(update: Callable[..., None]) -> Callable[..., None]:
    """``update`` (a method of SamplingParams that completes it), followed by the check.

    An engine on the V1 runner, which has no such buffers, is left alone.
    """

    def updated(params: Any, *args: Any, **kwargs: Any) -> None:
        from vllm import envs

        update(params, *args, **kwargs)
        if envs.VLLM_USE_V2_MODEL_RUNNER is not False:
            check_capacities(params)

    return updated
