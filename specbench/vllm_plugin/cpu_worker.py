"""The worker of vLLM's CPU build with the policy runner; named in ``worker_cls``."""

from __future__ import annotations

import vllm.v1.worker.cpu.shm  # noqa: F401  isort: skip  must precede vllm.v1.worker.gpu
import vllm.v1.worker.cpu.model_runner as cpu_runner_module
from vllm.v1.worker.cpu_worker import CPUWorker

from specbench.environment import check_vllm
from specbench.vllm_plugin.patching import replaced
from specbench.vllm_plugin.runner import PolicyRunner
from specbench.vllm_plugin.worker_calls import PolicyWorkerCalls


class PolicyCPURunner(PolicyRunner, cpu_runner_module.CPUModelRunner):  # type: ignore[misc]
    """vLLM's V2 runner on the CPU build, with policies."""


class PolicyCPUWorker(PolicyWorkerCalls, CPUWorker):  # type: ignore[misc]
    """CPU worker whose V2 runner asks a policy."""

    def init_device(self) -> None:
        """vLLM's, with the runner class replaced where it is looked up."""
        check_vllm()
        # CPUWorker.init_device imports the class by name when it is called.
        with replaced(cpu_runner_module, "CPUModelRunner", PolicyCPURunner):
            super().init_device()
