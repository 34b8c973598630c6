"""Calls the bench makes into the worker, through vLLM's ``collective_rpc``."""

from __future__ import annotations

import os
from typing import Any

import torch

from specbench.costs.store import from_payload as costs_from_payload
from specbench.errors import SpecbenchError
from specbench.estimators.engine_payload import from_payload
from specbench.policies import Drafter
from specbench.vllm_plugin.cpu.twin_times import TwinTimer


class PolicyWorkerCalls:
    """Calls the bench makes into the worker. Expected failures come back as {"error": ...}:
    an exception would take the engine down with it.
    """

    model_runner: Any
    twin_timer: TwinTimer | None = None

    def specbench_set_policy(self, policy: str) -> dict[str, Any]:
        """Switch the policy; no request may be running. Returns whether it drafts."""
        try:
            self.model_runner.set_policy(policy)
        except SpecbenchError as error:
            return {"error": str(error)}
        return {"drafts": self.model_runner.policy.drafter is not Drafter.NONE}

    def specbench_set_costs(self, table: dict[str, Any]) -> dict[str, Any]:
        """Install a cost table, given as the object that its JSON file holds."""
        try:
            self.model_runner.decisions.set_costs(costs_from_payload(table, "the cost table"))
        except SpecbenchError as error:
            return {"error": str(error)}
        return {}

    def specbench_set_calibration(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Install a calibration; see specbench.estimators.engine_payload."""
        try:
            self.model_runner.decisions.set_calibration(from_payload(payload))
        except SpecbenchError as error:
            return {"error": str(error)}
        return {}

    def specbench_take_steps(self, include_open: bool) -> list[dict[str, Any]]:
        """Steps since the last call, as keyword arguments of StepRecord."""
        log = self.model_runner.step_log
        steps: list[dict[str, Any]] = log.take(include_open=include_open)
        return steps

    def specbench_time_twins(self, running: bool) -> dict[str, float]:
        """Start timing the CPU twins, or stop and return milliseconds by kernel name."""
        if self.twin_timer is None:
            self.twin_timer = TwinTimer()
        if running:
            self.twin_timer.start()
            return {}
        return self.twin_timer.stop()

    def specbench_describe(self) -> dict[str, Any]:
        """Facts only the worker knows."""
        config = self.model_runner.vllm_config
        return {
            "pid": os.getpid(),
            "threads": torch.get_num_threads(),
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "block_size": config.cache_config.block_size,
            "num_kv_tokens": config.cache_config.num_gpu_blocks * config.cache_config.block_size
            if config.cache_config.num_gpu_blocks
            else None,
            "max_model_len": config.model_config.max_model_len,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "num_speculative_tokens": self.model_runner.num_speculative_steps,
            "draft_block_tokens": self.model_runner.decisions.limits.block_tokens,
        }
