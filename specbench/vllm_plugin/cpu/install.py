"""Hooks that let the V2 model runner start on vLLM's CPU build.

The V2 runner is switched off on a CPU for lack of Triton. Two module attributes and the
platform's kernel-override hook are enough to run it with the twins in this package; no
Triton is executed and vLLM's V1 runner is untouched.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

from specbench.vllm_plugin.cpu.binding import Twin, bound_by_name
from specbench.vllm_plugin.cpu.capacities import then_check
from specbench.vllm_plugin.patching import replaced


def prepare_process() -> None:
    """Announce Triton to the config check and hook the platform's override registration.

    Runs before vLLM resolves its configuration. Must not import ``vllm.v1.worker.gpu``:
    those modules may only be imported after ``vllm.v1.worker.cpu.shm`` has replaced the
    CUDA stream and event classes, which the hook below takes care of.
    """
    import vllm.config.vllm as vllm_config_module
    from vllm.platforms.cpu import CpuPlatform
    from vllm.sampling_params import SamplingParams

    # The config module's own binding: other users of HAS_TRITON must keep seeing False,
    # or the top-k/top-p path would launch a kernel that cannot run here.
    vllm_config_module.HAS_TRITON = True
    original_hook = CpuPlatform.register_triton_kernel_overrides.__func__
    original_config = CpuPlatform.check_and_update_config.__func__

    def register_overrides(cls: type) -> None:
        with scanning_only_vllm():
            original_hook(cls)
        install_twins()

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        original_config(cls, vllm_config)
        refuse_config(vllm_config)

    CpuPlatform.register_triton_kernel_overrides = classmethod(register_overrides)
    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    SamplingParams._validate_spec_decode = accepting_on_v2(SamplingParams._validate_spec_decode)
    for name in ("update_from_generation_config", "update_from_tokenizer"):
        setattr(SamplingParams, name, then_check(getattr(SamplingParams, name)))


def accepting_on_v2(check: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """vLLM's check of sampling parameters under speculation, for the V1 runner only.

    It refuses min_p and logit_bias, which V1's rejection sampler ignores. V2 applies both
    to every position it verifies; the engine tests hold it to V1's plain decoding.
    """

    def validate(params: Any, speculative_config: Any) -> None:
        from vllm import envs

        if envs.VLLM_USE_V2_MODEL_RUNNER is False:
            check(params, speculative_config)

    return validate


def refuse_config(vllm_config: Any) -> None:
    """Refuse engine settings that need a kernel without a twin; V1 engines are left alone.

    Raises:
        ValueError: names the setting.
    """
    from specbench.vllm_plugin.cpu.refused import REFUSED_CONFIG

    for path, reason in REFUSED_CONFIG.items():
        value: Any = vllm_config
        for attribute in path.split("."):
            value = getattr(value, attribute, None)
        if value and vllm_config.use_v2_model_runner:
            raise ValueError(f"{path} is not supported on a CPU: {reason}")


@contextlib.contextmanager
def scanning_only_vllm() -> Iterator[None]:
    """Let vLLM look for references to its kernels among its own modules only.

    Its scan reads every attribute of every imported module and fails on lazily importing
    ones (llvmlite's, which numba loads). Kernels are only ever held by vLLM's modules.
    """
    from vllm.triton_utils import dispatcher

    with replaced(dispatcher, "sys", SimpleNamespace(modules=_VllmModules())):
        yield


class _VllmModules:
    """``sys.modules``, of which only vLLM's are listed."""

    def __getitem__(self, name: str) -> ModuleType:
        return sys.modules[name]

    def values(self) -> list[ModuleType]:
        return [module for name, module in sys.modules.items() if name.startswith("vllm")]


def install_twins() -> None:
    """Register every twin; called in each worker process before the runner is imported."""
    import vllm.v1.worker.cpu.shm  # noqa: F401  must precede vllm.v1.worker.gpu imports
    from vllm.triton_utils import triton

    # Host-side helper of the V2 runner that the Triton placeholder lacks.
    if not hasattr(triton, "next_power_of_2"):
        triton.next_power_of_2 = next_power_of_2
    register_overrides(collect_overrides())
    import vllm.v1.worker.gpu.spec_decode.ngram.speculator as ngram_speculator

    # vLLM's own n-gram speculator checks this name before it launches kernels with twins.
    ngram_speculator.HAS_TRITON = True


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least ``n`` (1 for n <= 1), as triton.next_power_of_2."""
    return 1 << max(0, int(n) - 1).bit_length()


def collect_overrides() -> dict[str, Twin]:
    """All twins by fully qualified kernel name; a kernel with two twins raises ValueError."""
    from specbench.vllm_plugin.cpu.modules import TWIN_MODULES

    overrides: dict[str, Twin] = {}
    for module in TWIN_MODULES:
        for name, twin in module.OVERRIDES.items():
            if name in overrides:
                raise ValueError(f"kernel {name} has two CPU twins")
            overrides[name] = twin
    return overrides


_wrappers: dict[str, Any] = {}


def registered_wrappers() -> dict[str, Any]:
    """vLLM's override objects by kernel name, as registered in this process."""
    return dict(_wrappers)


def register_overrides(overrides: Mapping[str, Twin]) -> None:
    """Route launches of the named kernels to their twins, in vLLM's modules only.

    The launch is bound by name, which vLLM's own ``register_kernels`` does not do.
    """
    from vllm.triton_utils import dispatcher

    wrappers: dict[int, tuple[Any, Any]] = {}
    for name, twin in overrides.items():
        host, attribute = dispatcher._resolve_kernel(name)
        original = getattr(host, attribute)
        if isinstance(original, dispatcher.KernelOverride):
            continue
        stand_in = bound_by_name(original, twin)
        wrapper = dispatcher.KernelOverride(original, stand_in)
        dispatcher._registry[name] = (original, stand_in)
        wrappers[id(original)] = (original, wrapper)
        _wrappers[name] = wrapper
        setattr(host, attribute, wrapper)
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("vllm"):
            continue
        for attribute, value in list(vars(module).items()):
            found = wrappers.get(id(value))
            if found is not None and found[0] is value:
                setattr(module, attribute, found[1])
