"""Scalar pieces of the row kernels: bfloat16 as integers, ordered keys, a vectorisable exp.

numba has no bfloat16. A bfloat16 array is handed over as int16 (its bits), a float32 array as
itself; the functions here accept an element of either, so one row kernel serves both. They exist
only inside compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from specbench.kernels.cpu.compilation import CONTRACT, vectorised

Array = Any  # a numpy array; compiled code is specialised by its dtype and layout
Scalar = Any  # a numpy scalar


def widen(value: Scalar) -> Scalar:
    """The float32 value of a row element (float32, or the int16 bits of a bfloat16)."""
    raise NotImplementedError("only inside compiled code")


def narrow(value: Scalar, row: Array) -> Scalar:
    """A float32 as an element of ``row``: itself, or bfloat16 bits, rounded to nearest even."""
    raise NotImplementedError("only inside compiled code")


def ordered_key(value: Scalar) -> Scalar:
    """An integer that orders row elements as their values do, so that maxima vectorise.

    The integers of positive floats are ordered already; a negative float's other bits are
    flipped. -0 orders below +0, and a NaN outside everything, on the side of its sign.
    """
    raise NotImplementedError("only inside compiled code")


def key_value(key: Scalar) -> Scalar:
    """The float32 value of the element with this ordered key (the key is its own inverse)."""
    raise NotImplementedError("only inside compiled code")


# numba wants the same parameter annotations on an overload and on what it returns.


def _widen(value: Scalar) -> Callable[..., Any]:
    def from_bfloat16(value: Scalar) -> Scalar:
        return np.uint32(np.uint32(np.uint16(value)) << np.uint32(16)).view(np.float32)

    def from_float32(value: Scalar) -> Scalar:
        return value

    return from_bfloat16 if isinstance(value, types.Integer) else from_float32


def _narrow(value: Scalar, row: Array) -> Callable[..., Any]:
    def to_bfloat16(value: Scalar, row: Array) -> Scalar:
        if value != value:
            return np.int16(0x7FC0)  # the quiet NaN
        bits = np.float32(value).view(np.uint32)
        odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
        rounded = np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + odd)
        return np.int16(np.uint32(rounded >> np.uint32(16)))

    def to_float32(value: Scalar, row: Array) -> Scalar:
        return np.float32(value)

    return to_bfloat16 if isinstance(row.dtype, types.Integer) else to_float32


def _ordered_key(value: Scalar) -> Callable[..., Any]:
    def of_bfloat16(value: Scalar) -> Scalar:
        flip = np.int16(np.int16(value >> np.int16(15)) & np.int16(0x7FFF))
        return np.int16(value ^ flip)

    def of_float32(value: Scalar) -> Scalar:
        bits = np.float32(value).view(np.int32)
        flip = np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF))
        return np.int32(bits ^ flip)

    return of_bfloat16 if isinstance(value, types.Integer) else of_float32


def _key_value(key: Scalar) -> Callable[..., Any]:
    def of_bfloat16(key: Scalar) -> Scalar:
        return widen(ordered_key(key))

    def of_float32(key: Scalar) -> Scalar:
        flip = np.int32(np.int32(key >> np.int32(31)) & np.int32(0x7FFFFFFF))
        return np.int32(key ^ flip).view(np.float32)

    return of_bfloat16 if key.bitwidth == 16 else of_float32


overload(widen)(_widen)
overload(narrow)(_narrow)
overload(ordered_key)(_ordered_key)
overload(key_value)(_key_value)

# ln 2 in two parts (Cody and Waite 1980): the first has 15 significant bits, so that a whole
# multiple of it is exact and the reduced argument keeps its precision.
LN2_HIGH = np.float32(0.693145751953125)
LN2_LOW = np.float32(0.6931471805599453 - 0.693145751953125)
LOG2_E = np.float32(1.4426950408889634)
# 1.5 * 2**23: adding it leaves a float32's nearest integer in the low mantissa bits.
ROUNDER = np.float32(12582912.0)
ROUNDER_BITS = np.int32(0x4B400000)
# exp(-87) is about the smallest normal float32 (2**-126 is exp(-87.3)); below counts as exp(-87).
EXP_MIN = np.float32(-87.0)
C2, C3, C4, C5, C6 = (np.float32(1.0 / f) for f in (2.0, 6.0, 24.0, 120.0, 720.0))
ONE = np.float32(1.0)


@vectorised(CONTRACT)
def exp_nonpositive(x: Scalar) -> Scalar:
    """exp(x) for float32 x <= 0, without branches or library calls.

    x = n ln 2 + r with |r| <= ln 2 / 2; exp(r) by its Taylor polynomial of degree 6, whose
    remainder there is below 1.2e-7; the power of two goes into the exponent. Relative error
    under 4e-7. Anything below -87 (-inf included) and NaN give exp(-87).
    """
    x = x if x > EXP_MIN else EXP_MIN
    shifted = x * LOG2_E + ROUNDER
    n = shifted - ROUNDER
    r = x - n * LN2_HIGH
    r = r - n * LN2_LOW
    p = C6
    p = p * r + C5
    p = p * r + C4
    p = p * r + C3
    p = p * r + C2
    p = p * r + ONE
    p = p * r + ONE
    exponent = np.int32(np.float32(shifted).view(np.int32) - ROUNDER_BITS)
    power = np.int32(np.int32(exponent + np.int32(127)) << np.int32(23))
    return p * np.int32(power).view(np.float32)
