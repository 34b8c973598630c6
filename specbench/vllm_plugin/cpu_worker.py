"""The worker of vLLM's CPU build with the policy runner; named in ``worker_cls``."""

from __future__ import annotations

from typing import Any

import vllm.v1.worker.cpu.shm  # noqa: F401  isort: skip  must precede vllm.v1.worker.gpu
import vllm.v1.worker.cpu.model_runner as cpu_runner_module
from vllm.v1.worker.cpu_worker import CPUWorker

from specbench.environment import check_vllm
from specbench.vllm_plugin.patching import replaced
from specbench.vllm_plugin.runner import PolicyRunner
from specbench.vllm_plugin.worker_calls import PolicyWorkerCalls


class PolicyCPURunner(PolicyRunner, cpu_runner_module.CPUModelRunner):  # type: ignore[misc]
    """vLLM's V2 runner on the CPU build, with policies."""

    _drafter_layers: tuple[int, ...] = ()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load, and note which layers' outputs the drafter reads."""
        super().load_model(*args, **kwargs)
        if self.use_aux_hidden_state_outputs:
            # Wrappers (multimodal ones) keep the decoder elsewhere; their layers stay on.
            decoder = getattr(self.model, "model", None)
            self._drafter_layers = tuple(getattr(decoder, "aux_hidden_state_layers", ()))

    def set_policy(self, spec: str) -> None:
        """Switch; the target hands out intermediate layers only to a policy that drafts."""
        super().set_policy(spec)
        if self._drafter_layers:
            needed = self.policy.drafter.uses_model
            self.use_aux_hidden_state_outputs = needed
            self.model.set_aux_hidden_state_layers(self._drafter_layers if needed else ())


class PolicyCPUWorker(PolicyWorkerCalls, CPUWorker):  # type: ignore[misc]
    """CPU worker whose V2 runner asks a policy."""

    def init_device(self) -> None:
        """vLLM's, with the runner class replaced where it is looked up."""
        check_vllm()
        # CPUWorker.init_device imports the class by name when it is called.
        with replaced(cpu_runner_module, "CPUModelRunner", PolicyCPURunner):
            super().init_device()
