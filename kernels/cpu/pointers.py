"""Arrays over raw addresses inside compiled code.

vLLM hands some kernels a table of device pointers (one per key-value cache group, or one per
request) instead of tensors. On the CPU these are plain addresses; the functions here turn one
into an array view that compiled code can index. The caller vouches for the address and length.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic


def _void_pointer(_typing_context: Any, address: Any) -> Any:
    """Reinterpret an integer as an untyped pointer (numba intrinsic)."""
    signature = types.voidptr(address)

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        from llvmlite import ir  # type: ignore[import-untyped]

        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return signature, generate


void_pointer: Any = intrinsic(_void_pointer)


def _int32_at(address: int, length: int) -> Any:
    """View ``length`` int32 values that start at ``address``."""
    return carray(void_pointer(address), (length,), np.int32)


def _bytes_at(address: int, length: int) -> Any:
    """View ``length`` bytes that start at ``address``."""
    return carray(void_pointer(address), (length,), np.uint8)


int32_at: Any = njit(inline="always")(_int32_at)
bytes_at: Any = njit(inline="always")(_bytes_at)
