"""What the plugin accepts and refuses on a CPU, without starting an engine."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from specbench.vllm_plugin.cpu.install import accepting_on_v2, next_power_of_2, refuse_config


def config(*, v2, watermark=None, sharded=False):
    return SimpleNamespace(
        use_v2_model_runner=v2,
        watermark_config=watermark,
        parallel_config=SimpleNamespace(enable_batch_sharded_sampling=sharded),
    )


@pytest.mark.parametrize("settings", [{"watermark": object()}, {"sharded": True}])
def test_settings_without_a_twin_are_refused_by_name(settings):
    name = "watermark_config" if "watermark" in settings else "enable_batch_sharded_sampling"
    with pytest.raises(ValueError, match=name):
        refuse_config(config(v2=True, **settings))
    refuse_config(config(v2=False, **settings))


def test_ordinary_settings_pass():
    refuse_config(config(v2=True))


@pytest.mark.parametrize(("variable", "refused"), [("0", True), ("1", False), (None, False)])
def test_only_v1_keeps_the_refusal_of_parameters(monkeypatch, variable, refused):
    if variable is None:
        monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    else:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", variable)
    calls = []
    accepting_on_v2(lambda *arguments: calls.append(arguments))("params", "config")
    assert bool(calls) == refused


@pytest.mark.parametrize(
    ("n", "expected"), [(0, 1), (1, 1), (2, 2), (3, 4), (4096, 4096), (4097, 8192)]
)
def test_next_power_of_2(n, expected):
    assert next_power_of_2(n) == expected


def test_vllms_own_kernels_are_replaced_with_numba_loaded():
    # In a process of its own: overrides stay. Loading numba brings lazily importing modules,
    # which vLLM's own scan of all modules fails on.
    program = """
import llvmlite.binding
from vllm.triton_utils import dispatcher
from specbench.vllm_plugin.cpu import install
install.install_twins = lambda: None
install.prepare_process()
from vllm.platforms.cpu import CpuPlatform
CpuPlatform.register_triton_kernel_overrides()
from vllm.v1.worker.block_table import ComputeSlotMappingKernel
assert isinstance(ComputeSlotMappingKernel.kernel, dispatcher.KernelOverride)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_capacities_are_vllms():
    import ast
    import importlib.util
    from pathlib import Path

    from specbench.vllm_plugin.cpu import capacities

    package = importlib.util.find_spec("vllm")
    assert package is not None
    assert package.origin is not None
    source = Path(package.origin).parent / "v1/worker/gpu/sample/logit_bias.py"
    values = {
        node.targets[0].id: node.value.value
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    assert values["MAX_NUM_ALLOWED_TOKEN_IDS"] == capacities.MAX_ALLOWED_TOKEN_IDS
    assert values["MAX_NUM_LOGIT_BIAS_TOKENS"] == capacities.MAX_LOGIT_BIAS_TOKENS
    assert values["MAX_NUM_STOP_TOKEN_IDS"] == capacities.MAX_STOP_TOKEN_IDS
