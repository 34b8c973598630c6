"""Batch generation with vLLM in this process: many prompts, whole answers, no clock.

For making text, not for measuring: it runs vLLM as it comes, without the plugin's policies.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from specbench.engines.model_cache import ModelRef

# KV cache on a CPU: 128 requests of 1,000 tokens of the embedded target (23 KB a token).
CPU_KV_CACHE_BYTES = 3 * 1024**3
# Prompts of the built-in sources and their answers stay below it.
DEFAULT_MAX_MODEL_LEN = 2048


@dataclass(frozen=True)
class Finished:
    """One answer.

    Attributes:
        request_id: as given to :meth:`OfflineEngine.add`.
        token_ids: answer without the end-of-sequence token's text; that token is included
            where the model emitted it.
        stopped: the model ended it; False where the limit cut it off.
    """

    request_id: str
    token_ids: list[int]
    stopped: bool


class OfflineEngine:
    """vLLM's synchronous engine: add requests at any time, take answers as they finish.

    Args:
        target: the model.
        max_num_seqs: requests in a batch.
        seed: of the engine's sampling.
        engine_args: further arguments of vLLM's EngineArgs; they win over the defaults.
    """

    def __init__(
        self, target: ModelRef, *, max_num_seqs: int, seed: int, engine_args: dict[str, Any]
    ) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        # Plain vLLM: this text must not depend on the plugin.
        os.environ["VLLM_PLUGINS"] = ""
        from vllm import EngineArgs, LLMEngine
        from vllm.platforms import current_platform

        arguments: dict[str, Any] = {
            "model": target.path_or_id,
            "max_num_seqs": max_num_seqs,
            "seed": seed,
            "disable_log_stats": True,
            "enable_prefix_caching": False,
        }
        if target.is_default:
            arguments["max_model_len"] = DEFAULT_MAX_MODEL_LEN
        if current_platform.is_cpu():
            arguments["enforce_eager"] = True
            arguments["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
        self._engine: Any = LLMEngine.from_engine_args(EngineArgs(**(arguments | engine_args)))
        self.tokenizer: Any = self._engine.get_tokenizer()
        self.max_model_len: int = self._engine.model_config.max_model_len

    def add(
        self, request_id: str, token_ids: list[int], *, temperature: float, max_tokens: int
    ) -> None:
        """Queue one prompt.

        Raises:
            ValueError: the engine refuses it, for example because it is too long.
        """
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._engine.add_request(request_id, TokensPrompt(prompt_token_ids=token_ids), params)

    def step(self) -> Iterator[Finished]:
        """One engine step; yields what finished in it."""
        for output in self._engine.step():
            if output.finished:
                completion = output.outputs[0]
                yield Finished(
                    output.request_id,
                    list(completion.token_ids),
                    completion.finish_reason == "stop",
                )
