"""The process behind oracle.py: answers calls into vLLM, in reference or twin mode."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]


def prepare_reference() -> None:
    """Make vLLM take Triton for usable, with the interpreter behind every kernel."""
    from triton import backends
    from triton.backends.driver import DriverBase

    class InterpreterDriver(DriverBase):  # type: ignore[misc]
        """vLLM asks a CPU build only whether a "cpu" backend with an active driver exists."""

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            raise NotImplementedError

        def get_current_target(self) -> Any:
            raise NotImplementedError

        def get_active_torch_device(self) -> Any:
            import torch

            return torch.device("cpu")

        def get_benchmarker(self) -> Any:
            raise NotImplementedError

    # The Nvidia and AMD drivers look for their own hardware; only the interpreter shall count.
    backends.backends.clear()
    backends.backends["cpu"] = backends.Backend(backends.BaseBackend, InterpreterDriver)
    _accept_any_mask_dtype()
    _compute_bfloat16()


def _accept_any_mask_dtype() -> None:
    """Turn masks into booleans before the interpreter's loads and stores see them.

    A block boolean combined with a scalar comparison has an integer dtype in the interpreter,
    which its memory functions reject ("mask has unsupported dtype"); a compiler would not.
    """
    from triton.runtime import interpreter

    native = interpreter._interpreter

    def as_bool(mask: Any) -> Any:
        return mask if mask.dtype == bool else mask.astype(bool)

    class Memory:
        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

        def load(self, ptrs: Any, mask: Any, other: Any, dtype: Any) -> Any:
            return native.load(ptrs, as_bool(mask), other, dtype)

        def store(self, ptrs: Any, value: Any, mask: Any) -> Any:
            return native.store(ptrs, value, as_bool(mask))

        def atomic_rmw(self, op: Any, ptrs: Any, value: Any, mask: Any, sem: Any) -> Any:
            return native.atomic_rmw(op, ptrs, value, as_bool(mask), sem)

    interpreter._interpreter = Memory()


def _compute_bfloat16() -> None:
    """Make the interpreter compare and add bfloat16 values instead of their bits.

    It keeps them as uint16: comparisons and arithmetic act on the bits, and float32 is truncated
    to bfloat16. A compiler widens, and rounds to nearest even.
    """
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    native_op, native_cast = InterpreterBuilder.binary_op, InterpreterBuilder.cast_impl

    def widen(data: Any) -> Any:
        return (data.astype(np.uint32) << 16).view(np.float32)

    def narrow(data: Any) -> Any:
        rounded = torch.from_numpy(np.asarray(data)).bfloat16().view(torch.int16)
        return rounded.numpy().view(np.uint16)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.dtype.scalar != tl.bfloat16 or lhs.data.dtype != np.uint16:
            return native_op(self, lhs, rhs, op)
        output = op(widen(lhs.data), widen(rhs.data))
        output = output if output.dtype == bool else narrow(output)
        return TensorHandle(output, tl.bfloat16)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            return TensorHandle(narrow(src.data), tl.bfloat16)
        return native_cast(self, src, dst_type)

    InterpreterBuilder.binary_op = binary_op
    InterpreterBuilder.cast_impl = cast_impl


def _define_device_functions() -> None:
    """Give the interpreter the two CUDA device functions that the kernels call."""
    import numpy as np
    import vllm.v1.worker.gpu.metrics.logits as metrics
    import vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils as rejection
    from triton.language import core
    from triton.runtime.interpreter import TensorHandle

    def log1p(x: Any) -> Any:
        return core.tensor(TensorHandle(np.log1p(x.handle.data), x.handle.dtype), x.dtype)

    metrics.libdevice = SimpleNamespace(isnan=lambda x: x != x)
    rejection.tldevice = SimpleNamespace(log1p=log1p)


def prepare_twin() -> None:
    """Register every twin in place of its kernel, as the plugin does in an engine."""
    from vllm.triton_utils import HAS_TRITON

    from specbench.vllm_plugin.cpu.install import install_twins

    assert not HAS_TRITON, "the twin worker must not run Triton"
    install_twins()


def resolve(module_name: str, path: str) -> Any:
    target: Any = importlib.import_module(module_name)
    for part in path.split("."):
        target = getattr(target, part)
    return target


def answer(request: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    if request[0] == "call":
        _, target, args, kwargs = request
        value = resolve(*target.split(":"))(*args, **kwargs)
    else:
        _, kernel, grid, args, kwargs = request
        value = resolve(*kernel.rsplit(".", 1))[grid](*args, **kwargs)
    return value, args, kwargs


def serve(mode: str) -> None:
    # Keep the pipe for frames alone: whatever a library prints goes to stderr.
    frames_out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.path.insert(0, str(REPOSITORY))
    import torch

    torch.set_num_threads(1)
    if mode == "reference":
        prepare_reference()
        import vllm.v1.worker.cpu.shm  # noqa: F401  (must precede vllm.v1.worker.gpu)

        _define_device_functions()
    else:
        prepare_twin()
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            reply = pickle.dumps((True, answer(request)), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception:
            reply = pickle.dumps((False, traceback.format_exc()))
        frames_out.write(reply)
        frames_out.flush()


if __name__ == "__main__":
    serve(sys.argv[1])
