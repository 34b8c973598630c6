"""What vLLM is told at the start: engine arguments and environment."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from specbench.engines.config import EngineConfig
from specbench.engines.cpu_binding import BINDING_VARIABLE, bind_ranks
from specbench.engines.model_cache import DrafterRef, ModelRef
from specbench.errors import UsageError

CPU_WORKER = "specbench.vllm_plugin.cpu_worker.PolicyCPUWorker"
GPU_WORKER = "specbench.vllm_plugin.gpu_worker.PolicyGPUWorker"
# The embedded target allows 8,192; a quarter of it holds every built-in workload and keeps
# the per-request buffers small.
DEFAULT_MAX_MODEL_LEN = 2048
# Enough KV cache for 64 requests of 1,000 tokens of the embedded target (23 KB a token).
DEFAULT_CPU_KV_CACHE_BYTES = 2 * 1024**3
# What vLLM takes for max_num_batched_tokens unless told otherwise.
VLLM_BATCHED_TOKENS = 2048
# Draft slots of a request: a copied chain is worth verifying far beyond a model's block (the
# Hybrid Spark paper, arXiv:2611.05611, uses more than a block for the same reason); calibrated
# survival of the 16th token of a long match is still above 0.5 on the embedded target.
DEFAULT_DRAFT_SLOTS = 16


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
    config: EngineConfig, target: ModelRef, drafter: DrafterRef | None, *, on_cpu: bool
) -> dict[str, Any]:
    """Keyword arguments of AsyncEngineArgs; the user's ``--engine-arg`` win over all others.

    Raises:
        UsageError: an engine on which no policy can run.
    """
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
    if on_cpu:
        # Compilation costs a minute at start and brought nothing on the CPU build.
        arguments["enforce_eager"] = True
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            arguments["kv_cache_memory_bytes"] = DEFAULT_CPU_KV_CACHE_BYTES
    if config.engine_args.get("pipeline_parallel_size", 1) != 1:
        raise UsageError("policies do not run on pipeline-parallel engines; use tensor parallelism")
    if not config.plain:
        arguments["worker_cls"] = CPU_WORKER if on_cpu else GPU_WORKER
        arguments["additional_config"] = {"specbench": dict(config.plugin_settings)}
        speculative = speculative_config(config, drafter, on_cpu=on_cpu)
        arguments["speculative_config"] = speculative
        arguments["max_num_batched_tokens"] = batched_tokens(
            config.max_num_seqs, speculative.get("num_speculative_tokens") or DEFAULT_DRAFT_SLOTS
        )
    additional = config.engine_args.get("additional_config")
    if isinstance(additional, dict) and "additional_config" in arguments:
        arguments["additional_config"] = {**arguments["additional_config"], **additional}
        return {
            **arguments,
            **config.engine_args,
            "additional_config": arguments["additional_config"],
        }
    return {**arguments, **config.engine_args}


def speculative_config(
    config: EngineConfig, drafter: DrafterRef | None, *, on_cpu: bool
) -> dict[str, Any]:
    """vLLM's speculative configuration: the model drafter, or n-gram lookup without one."""
    if drafter is None and not on_cpu:
        # Without the model drafter's manager nothing would hold vLLM's asynchronous
        # scheduler to the policy: it verifies a full block for every request.
        raise UsageError("on a GPU the policies need a model drafter: give one with --drafter")
    if drafter is None:
        return {
            "method": "ngram_gpu",
            "num_speculative_tokens": config.num_speculative_tokens or DEFAULT_DRAFT_SLOTS,
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
    num_slots = config.num_speculative_tokens or default_slots(drafter)
    if num_slots is not None:
        speculative["num_speculative_tokens"] = num_slots
    return speculative


def batched_tokens(max_num_seqs: int, num_slots: int) -> int | None:
    """Room for every request's slots in a step; None where vLLM's default has it.

    vLLM counts a request's scheduled drafts and reserves as many again for the next ones. With
    its default of 2,048 tokens more than 64 requests of 16 slots would silently take turns.
    """
    needed = max_num_seqs * 2 * num_slots
    return None if needed <= VLLM_BATCHED_TOKENS // 2 else needed + VLLM_BATCHED_TOKENS


def default_slots(drafter: DrafterRef) -> int | None:
    """The longer of the drafter's block and DEFAULT_DRAFT_SLOTS.

    None, which leaves it to vLLM (the drafter's block), where the block is not known yet: a hub
    id is only resolved inside the engine.
    """
    try:
        config = json.loads(Path(drafter.path_or_id, "config.json").read_text(encoding="utf-8"))
        block = config.get("block_size") or config["dspark_block_size"]
        return max(int(block), DEFAULT_DRAFT_SLOTS)
    except (OSError, ValueError, KeyError, TypeError):
        return None
