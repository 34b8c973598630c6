"""A real vLLM engine in processes of its own, behind the interface the bench uses.

Only vLLM's public front end is used here; what runs inside the engine is vllm_plugin's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import fields
from typing import Any

from specbench.engines.arguments import engine_arguments, set_process_environment
from specbench.engines.config import EngineConfig
from specbench.engines.engine_log import (
    last_error_line,
    log_size,
    output_to_file,
    send_logger_to_file,
)
from specbench.engines.model_cache import DrafterRef, ModelRef, resolve_drafter, resolve_model
from specbench.errors import EngineFailure, InputError, UsageError
from specbench.records import Chunk, EngineRequest, Message, StepRecord

# Freed blocks may arrive one engine step after the last request finished.
RESET_ATTEMPTS = 50
RESET_PAUSE_S = 0.02
# How often a pending call checks that the engine still lives.
DEATH_POLL_S = 0.5
# The call that specbench.vllm_plugin.engine_core adds to the engine loop.
EXPECT_DRAFTS = "specbench_expect_drafts"


class VLLMEngine:
    """One running vLLM engine whose policy can be switched between requests.

    Build it with :func:`start_engine`. Satisfies :class:`specbench.engines.base.Engine`.
    """

    def __init__(
        self,
        llm: Any,
        config: EngineConfig,
        target: ModelRef,
        drafter: DrafterRef | None,
        log_start: int,
    ) -> None:
        self._llm: Any = llm
        self._config = config
        self._log_start = log_start
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
            self._facts = (await self._rpc("specbench_describe"))[0][0]

    async def set_policy(self, policy: str, *, while_running: bool = False) -> None:
        """Switch to ``name[:argument]``; clears the prefix cache so that no policy starts warm.

        Args:
            while_running: leave running requests and the cache alone. Only for profiling
                and then only towards a policy that needs no drafter context the previous one
                left out.
        """
        if not while_running:
            await self._clear_prefix_cache()
        (switched, *_) = await self._checked_rpc("specbench_set_policy", policy)
        core = self._llm.engine_core
        await self._guarded(core.call_utility_all_async(EXPECT_DRAFTS, switched["drafts"]))

    async def set_costs(self, table: dict[str, Any]) -> None:
        """Install a step-cost table, as the object its JSON file holds, in every worker."""
        await self._checked_rpc("specbench_set_costs", table)

    async def set_calibration(self, payload: dict[str, Any], source: str = "given") -> None:
        """Install a calibration, given as specbench.estimators.engine_payload writes it.

        Args:
            source: where it comes from, for the engine's account of itself.
        """
        await self._checked_rpc("specbench_set_calibration", payload)
        self._facts["calibration"] = source

    async def take_steps(self, *, include_open: bool = True) -> list[StepRecord]:
        """Steps recorded since the last call, oldest first; rank 0 of every engine copy.

        Args:
            include_open: also the last one, whose duration is not known yet; otherwise it
                stays for the next call.
        """
        if self._config.plain:
            return []
        copies = await self._rpc("specbench_take_steps", include_open)
        steps = [step for copy in copies for step in copy[0]]
        return [StepRecord(**{key: _frozen(value) for key, value in s.items()}) for s in steps]

    async def generate(self, request: EngineRequest) -> AsyncIterator[Chunk]:
        """Stream one request; closing the iterator aborts it."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import TokensPrompt
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            params = self._sampling_params(request)
        except (ValueError, VLLMClientError) as error:
            raise InputError(f"request {request.request_id}: {error}") from error
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
        totals: dict[str, float] = (await self._rpc("specbench_time_twins", running))[0][0]
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
            "draft_sample_method": self._config.draft_sample_method,
            "tensor_parallel_size": self._config.tensor_parallel_size,
            "data_parallel_size": self._config.data_parallel_size,
            "engine_args": dict(self._config.engine_args),
            **{key: value for key, value in self._facts.items() if key != "pid"},
        }

    @property
    def target(self) -> ModelRef:
        """The served model."""
        return self._target

    @property
    def drafter(self) -> DrafterRef | None:
        """The model drafter; None without one."""
        return self._drafter

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
            if await self._guarded(self._llm.reset_prefix_cache()):
                return
            await asyncio.sleep(RESET_PAUSE_S)
        raise UsageError("the policy cannot be switched while requests are running")

    async def _rpc(self, method: str, *args: Any) -> list[list[Any]]:
        """Call every worker of every engine copy: [num_copies][num_ranks] results."""
        core = self._llm.engine_core
        call = core.call_utility_all_async("collective_rpc", method, None, args, {})
        results: list[list[Any]] = await self._guarded(call)
        return results

    async def _checked_rpc(self, method: str, *args: Any) -> list[dict[str, Any]]:
        results = [result for copy in await self._rpc(method, *args) for result in copy]
        for result in results:
            if message := result.get("error"):
                raise UsageError(message)
        return results

    async def _guarded(self, call: Awaitable[Any]) -> Any:
        """Await a call into the engine. vLLM leaves it pending for ever if the engine dies.

        Raises:
            EngineFailure: the engine died before or during the call.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        task = asyncio.ensure_future(call)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=DEATH_POLL_S)
                if not task.done() and self._llm.errored:
                    raise self._death()
            return task.result()
        except EngineDeadError as error:
            raise self._death() from error
        finally:
            task.cancel()

    def _death(self) -> EngineFailure:
        cause = last_error_line(self._config.log_file, start=self._log_start)
        detail = f": {cause}" if cause else ""
        return EngineFailure(f"the engine died{detail} ({log_hint(self._config)})")


def log_hint(config: EngineConfig) -> str:
    """Where the engine's own words are."""
    return "log: above" if config.verbose else f"log: {config.log_file}"


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
    on_cpu = build.device == "cpu"
    arguments = engine_arguments(config, target, drafter, on_cpu=on_cpu)
    set_process_environment(config, on_cpu=on_cpu)
    log_start = log_size(config.log_file)
    with output_to_file(config.log_file, verbose=config.verbose):
        llm = _create(config, arguments, log_start)
    if not config.verbose:
        # vLLM sets its handlers up again while it starts.
        send_logger_to_file("vllm", config.log_file)
    try:
        engine = VLLMEngine(llm, config, target, drafter, log_start)
        await engine.load_facts()
    except BaseException:
        # The engine's processes ignore Ctrl-C: nobody else would stop them.
        llm.shutdown()
        raise
    return engine


def _create(config: EngineConfig, arguments: dict[str, Any], log_start: int) -> Any:
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    if unknown := sorted(set(arguments) - {f.name for f in fields(AsyncEngineArgs)}):
        raise UsageError(f"vLLM has no engine argument {unknown[0]!r} (given with --engine-arg)")
    try:
        engine_args = AsyncEngineArgs(**arguments)
        vllm_config = engine_args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    except Exception as error:
        raise UsageError(f"vLLM refuses this engine: {first_reason(error)}") from error
    try:
        return AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=True)
    except Exception as error:
        cause = last_error_line(config.log_file, start=log_start) or first_reason(error)
        raise EngineFailure(f"vLLM did not start: {cause} ({log_hint(config)})") from error


def first_reason(error: Exception) -> str:
    """The sentence of an error that says why; pydantic wraps it into several lines."""
    details = getattr(error, "errors", None)
    if callable(details) and (found := details()):
        where = ".".join(str(part) for part in found[0].get("loc", ()))
        message = str(found[0].get("msg", error)).removeprefix("Value error, ")
        return f"{where}: {message}" if where else message
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def _frozen(value: Any) -> Any:
    """Lists as tuples, to any depth."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
