"""The worker of vLLM's GPU build with the policy runner; named in ``worker_cls``."""

from __future__ import annotations

import functools
from typing import Any

import vllm.v1.worker.gpu.model_runner as gpu_runner_module
from vllm.v1.worker.gpu_worker import Worker

from specbench.environment import check_vllm
from specbench.vllm_plugin.patching import replaced
from specbench.vllm_plugin.runner import PolicyRunner
from specbench.vllm_plugin.verification import PolicyVerification
from specbench.vllm_plugin.worker_calls import PolicyWorkerCalls


class PolicyGPURunner(PolicyRunner, gpu_runner_module.GPUModelRunner):  # type: ignore[misc]
    """vLLM's V2 runner on a GPU, with policies.

    The engine is started with ``enable_adaptive_verification``, so that vLLM itself
    captures graphs for ragged verification; only the manager's class differs.
    """

    uses_stock_adaptive_setup = True

    def __init__(self, vllm_config: Any, device: Any) -> None:
        """vLLM's, with the requests' tokens in device memory.

        vLLM keeps them in host memory unless its own n-gram method runs; the lookup reads
        all of them every step.
        """
        dense = functools.partial(dense_request_state, gpu_runner_module.RequestState)
        with replaced(gpu_runner_module, "RequestState", dense):
            super().__init__(vllm_config, device)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's, with the policy's manager created where vLLM creates its own."""

        stock_create = gpu_runner_module.maybe_create_adaptive_verification_manager

        def create(**arguments: Any) -> PolicyVerification | None:
            # vLLM's own factory first: it refuses attention backends that cannot do this.
            if stock_create(**arguments) is None:
                return None
            return self.make_verification(
                arguments["req_states"],
                arguments["query_start_loc"],
                arguments["num_bonus_tokens"],
                arguments["max_total_logits"],
            )

        name = "maybe_create_adaptive_verification_manager"
        with replaced(gpu_runner_module, name, create):
            super().initialize_kv_cache(*args, **kwargs)


def dense_request_state(stock: Any, **arguments: Any) -> Any:
    """vLLM's request states with ``all_token_ids`` on the device."""
    return stock(**{**arguments, "use_dense_all_token_ids": True})


class PolicyGPUWorker(PolicyWorkerCalls, Worker):  # type: ignore[misc]
    """GPU worker whose V2 runner asks a policy."""

    def init_device(self) -> None:
        """vLLM's, with the runner class replaced where it is looked up."""
        check_vllm()
        with replaced(gpu_runner_module, "GPUModelRunner", PolicyGPURunner):
            super().init_device()
