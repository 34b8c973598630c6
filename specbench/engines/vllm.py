"""A real vLLM engine in processes of its own, behind the interface the bench uses.

Only vLLM's public front end is used here; what runs inside the engine is vllm_plugin's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import re
import time
from collections.abc import AsyncIterator
from typing import Any

from specbench.engines.config import EngineConfig
from specbench.engines.cpu_binding import BINDING_VARIABLE, bind_ranks
from specbench.engines.engine_log import last_error_line, output_to_file, send_logger_to_file
from specbench.engines.model_cache import DrafterRef, ModelRef, resolve_drafter, resolve_model
from specbench.errors import EngineFailure, InputError, UsageError
from specbench.records import Chunk, EngineRequest, Message, StepRecord

CPU_WORKER = "specbench.vllm_plugin.cpu_worker.PolicyCPUWorker"
GPU_WORKER = "specbench.vllm_plugin.gpu_worker.PolicyGPUWorker"
# The embedded target allows 8,192; a quarter of it holds every built-in workload and keeps
# the per-request buffers small.
DEFAULT_MAX_MODEL_LEN = 2048
# Enough KV cache for 64 requests of 1,000 tokens of the embedded target (23 KB a token).
DEFAULT_CPU_KV_CACHE_BYTES = 2 * 1024**3
# Draft tokens of a step for engines without a model drafter: the block length of the
# embedded drafter, so that ngram is comparable with and without it.
DEFAULT_NGRAM_TOKENS = 7
# Freed blocks may arrive one engine step after the last request finished.
RESET_ATTEMPTS = 50
RESET_PAUSE_S = 0.02


class VLLMEngine:
    """One running vLLM engine whose policy can be switched between requests.

    Build it with :func:`start_engine`. Satisfies :class:`specbench.engines.base.Engine`.
    """

    def __init__(
        self, llm: Any, config: EngineConfig, target: ModelRef, drafter: DrafterRef | None
    ) -> None:
        self._llm: Any = llm
        self._config = config
        self._target = target
        self._drafter = drafter
        self._tokenizer = llm.get_tokenizer()
        self._facts: dict[str, Any] = {}
        self._closed = False

    async def load_facts(self) -> None:
        """Ask the worker what only it knows; called once after the start."""
        if self._config.plain:
            vllm_config = self._llm.vllm_config
            self._facts = {"max_model_len": vllm_config.model_config.max_model_len}
        else:
            self._facts = (await self._rpc("specbench_describe"))[0]

    async def set_policy(self, policy: str, *, while_running: bool = False) -> None:
        """Switch to ``name[:argument]``; clears the prefix cache so that no policy starts warm.

        Args:
            while_running: leave running requests and the cache alone. Only for profiling
                and only between policies that run the same drafter.
        """
        if not while_running:
            await self._clear_prefix_cache()
        (switched, *_) = await self._checked_rpc("specbench_set_policy", policy)
        core = self._llm.engine_core
        await core.call_utility_async("specbench_expect_drafts", switched["drafts"])

    async def set_costs(self, table: dict[str, Any]) -> None:
        """Install a step-cost table, as the object its JSON file holds, in every worker."""
        await self._checked_rpc("specbench_set_costs", table)

    async def take_steps(self, *, include_open: bool = True) -> list[StepRecord]:
        """Steps recorded since the last call (rank 0), oldest first.

        Args:
            include_open: also the last one, whose duration is not known yet; otherwise it
                stays for the next call.
        """
        if self._config.plain:
            return []
        steps = (await self._rpc("specbench_take_steps", include_open))[0]
        for step in steps:
            step["accepted_per_request"] = tuple(step["accepted_per_request"])
            step["verified_per_request"] = tuple(step["verified_per_request"])
        return [StepRecord(**step) for step in steps]

    async def generate(self, request: EngineRequest) -> AsyncIterator[Chunk]:
        """Stream one request; closing the iterator aborts it."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import TokensPrompt
        from vllm.v1.engine.exceptions import EngineDeadError

        params = self._sampling_params(request)
        prompt = TokensPrompt(prompt_token_ids=list(request.prompt_token_ids))
        stream = self._llm.generate(prompt, params, request.request_id)
        try:
            async for output in stream:
                completion = output.outputs[0]
                yield Chunk(
                    tuple(completion.token_ids), time.perf_counter(), completion.finish_reason
                )
        except EngineDeadError as error:
            raise self._death() from error
        except (ValueError, VLLMClientError) as error:
            raise InputError(f"request {request.request_id}: {error}") from error
        finally:
            await stream.aclose()

    async def time_twins(self, running: bool) -> dict[str, float]:
        """Start timing the kernels' CPU twins, or stop and get milliseconds by kernel."""
        totals: dict[str, float] = (await self._rpc("specbench_time_twins", running))[0]
        return totals

    def encode_chat(self, messages: list[Message]) -> list[int]:
        """Apply the model's chat template, generation prompt included."""
        chat = [{"role": m.role, "content": m.content} for m in messages]
        if getattr(self._tokenizer, "chat_template", None) is None:
            raise InputError(
                f"model {self._target.path_or_id} has no chat template; "
                "use a workload of raw prompts"
            )
        ids = self._tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return list(ids)

    def encode_text(self, text: str) -> list[int]:
        """Tokenize a raw completion prompt."""
        return list(self._tokenizer.encode(text))

    def decode(self, token_ids: list[int]) -> str:
        """Text of output tokens, special tokens left out."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def describe(self) -> dict[str, Any]:
        """Provenance of everything measured on this engine."""
        import torch
        import vllm

        gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
        return {
            "engine": "vllm",
            "vllm_version": vllm.__version__,
            "torch_version": torch.__version__,
            "python_version": platform.python_version(),
            "processor": processor_name(),
            "num_cores": os.cpu_count(),
            "gpu": gpu,
            "model": self._target.path_or_id if not self._target.is_default else "default",
            "model_fingerprint": self._target.fingerprint,
            "drafter": None
            if self._drafter is None
            else ("default" if self._drafter.is_default else self._drafter.path_or_id),
            "drafter_fingerprint": None if self._drafter is None else self._drafter.fingerprint,
            "max_num_seqs": self._config.max_num_seqs,
            "tensor_parallel_size": self._config.tensor_parallel_size,
            "data_parallel_size": self._config.data_parallel_size,
            "engine_args": dict(self._config.engine_args),
            **{key: value for key, value in self._facts.items() if key != "pid"},
        }

    @property
    def worker_pid(self) -> int | None:
        """Process id of the first worker, for fault tests."""
        return self._facts.get("pid")

    async def close(self) -> None:
        """Stop the engine's processes; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        with output_to_file(self._config.log_file, verbose=self._config.verbose):
            await asyncio.to_thread(self._llm.shutdown)
        # Its finalizer calls this again, at interpreter exit with modules already gone.
        self._llm.shutdown = lambda *args, **kwargs: None

    def _sampling_params(self, request: EngineRequest) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            max_tokens=request.max_tokens,
            ignore_eos=sampling.ignore_eos,
            # The bench times tokens; text is decoded after the clock has stopped.
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    async def _clear_prefix_cache(self) -> None:
        for _ in range(RESET_ATTEMPTS):
            if await self._llm.reset_prefix_cache():
                return
            await asyncio.sleep(RESET_PAUSE_S)
        raise UsageError("the policy cannot be switched while requests are running")

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            results: list[Any] = await self._llm.collective_rpc(method, args=args)
        except EngineDeadError as error:
            raise self._death() from error
        return results

    async def _checked_rpc(self, method: str, *args: Any) -> list[dict[str, Any]]:
        results = await self._rpc(method, *args)
        for result in results:
            if message := result.get("error"):
                raise UsageError(message)
        return results

    def _death(self) -> EngineFailure:
        cause = last_error_line(self._config.log_file)
        detail = f": {cause}" if cause else ""
        return EngineFailure(f"the engine died{detail} (log: {self._config.log_file})")


def processor_name() -> str:
    """Processor model as the operating system names it."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as info:
        for line in info:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


async def start_engine(config: EngineConfig) -> VLLMEngine:
    """Start vLLM as configured and wait until it serves.

    Raises:
        EnvironmentProblem: vLLM missing or unsupported, no space for the model cache.
        InputError: model or drafter cannot be used.
        UsageError: an engine argument vLLM does not know.
        EngineFailure: the engine did not start; the message names its log.
    """
    from specbench.environment import check_vllm

    build = check_vllm()
    target = resolve_model(config.model)
    drafter = resolve_drafter(config.drafter, target)
    set_process_environment(config, on_cpu=build.device == "cpu")
    with output_to_file(config.log_file, verbose=config.verbose):
        llm = _create(config, target, drafter)
    if not config.verbose:
        # vLLM sets its handlers up again while it starts.
        send_logger_to_file("vllm", config.log_file)
    engine = VLLMEngine(llm, config, target, drafter)
    await engine.load_facts()
    return engine


def _create(config: EngineConfig, target: ModelRef, drafter: DrafterRef | None) -> Any:
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = engine_arguments(config, target, drafter)
    try:
        engine_args = AsyncEngineArgs(**arguments)
    except TypeError as error:
        name = str(error).rpartition("argument ")[2].strip("'\"")
        raise UsageError(f"vLLM has no engine argument {name} (given with --engine-arg)") from error
    try:
        vllm_config = engine_args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    except (ValueError, TypeError, OSError) as error:
        raise UsageError(f"vLLM refuses this engine: {first_reason(error)}") from error
    try:
        return AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=True)
    except Exception as error:
        cause = last_error_line(config.log_file) or first_reason(error)
        raise EngineFailure(f"vLLM did not start: {cause} (log: {config.log_file})") from error


def first_reason(error: Exception) -> str:
    """The sentence of an error that says why; pydantic wraps it into several lines."""
    text = str(error).strip() or type(error).__name__
    wrapped = re.search(r"Value error, (.+?)(?: \[type=|$)", text, flags=re.DOTALL)
    return (wrapped.group(1) if wrapped else text).splitlines()[0]


def set_process_environment(config: EngineConfig, *, on_cpu: bool) -> None:
    """Environment that vLLM reads when it is imported or starts its processes."""
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["DO_NOT_TRACK"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if config.verbose else "WARNING")
    os.environ["SPECBENCH_ENGINE_OWN_GROUP"] = "1"
    if on_cpu and (binding := bind_ranks(config.tensor_parallel_size)):
        os.environ[BINDING_VARIABLE] = binding
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0" if config.plain == "v1" else "1"


def engine_arguments(
    config: EngineConfig, target: ModelRef, drafter: DrafterRef | None
) -> dict[str, Any]:
    """Keyword arguments of AsyncEngineArgs; the user's ``--engine-arg`` win over all others."""
    from vllm.platforms import current_platform

    arguments: dict[str, Any] = {
        "model": target.path_or_id,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len
        or (DEFAULT_MAX_MODEL_LEN if target.is_default else None),
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": config.tensor_parallel_size,
        "data_parallel_size": config.data_parallel_size,
        "distributed_executor_backend": config.distributed_executor_backend,
        "trust_remote_code": config.trust_remote_code,
        "disable_log_stats": True,
    }
    if current_platform.is_cpu():
        # Compilation costs a minute at start and brought nothing on the CPU build.
        arguments["enforce_eager"] = True
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            arguments["kv_cache_memory_bytes"] = DEFAULT_CPU_KV_CACHE_BYTES
    if not config.plain:
        on_cpu = current_platform.is_cpu()
        arguments["worker_cls"] = CPU_WORKER if on_cpu else GPU_WORKER
        arguments["additional_config"] = {"specbench": dict(config.plugin_settings)}
        arguments["speculative_config"] = speculative_config(config, drafter, on_cpu=on_cpu)
    return {**arguments, **config.engine_args}


def speculative_config(
    config: EngineConfig, drafter: DrafterRef | None, *, on_cpu: bool
) -> dict[str, Any]:
    """vLLM's speculative configuration: the model drafter, or n-gram lookup without one."""
    if drafter is None:
        return {
            "method": "ngram_gpu",
            "num_speculative_tokens": config.num_speculative_tokens or DEFAULT_NGRAM_TOKENS,
            # vLLM insists on values; the plugin's own lookup uses PluginSettings.
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        }
    speculative: dict[str, Any] = {
        "method": "dspark",
        "model": drafter.path_or_id,
        "draft_sample_method": config.draft_sample_method,
    }
    if not on_cpu:
        # vLLM then captures graphs for ragged verification itself. The CPU build has none
        # and refuses the flag; the policy runner sets the rest up there.
        speculative["enable_adaptive_verification"] = True
    if config.num_speculative_tokens is not None:
        speculative["num_speculative_tokens"] = config.num_speculative_tokens
    return speculative
