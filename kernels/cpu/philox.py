"""The uniform number that decides an acceptance, drawn as Triton's ``tl.rand`` draws it.

Philox-4x32 with 10 rounds (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2,
3, SC 2011): key = the request's 64-bit seed, counter = the token's 64-bit position.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specbench.kernels.cpu.compilation import vectorised

# Multipliers and key increments of Philox-4x32, from the paper's reference implementation.
MULTIPLIER_0 = np.uint64(0xD2511F53)
MULTIPLIER_2 = np.uint64(0xCD9E8D57)
INCREMENT_0 = np.uint32(0x9E3779B9)
INCREMENT_1 = np.uint32(0xBB67AE85)
NUM_ROUNDS = 10
# Triton's factor from a 31-bit integer to [0, 1); also its smallest positive value, which vLLM
# puts in place of 0 so that the logarithm stays finite.
UNIFORM_SCALE = np.float32(4.6566127342e-10)

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


@vectorised()
def philox_4x32(seed: Any, position: Any) -> Any:
    """Return the first of the four 32-bit outputs of Philox-4x32-10."""
    c0 = np.uint32(np.uint64(position) & _LOW)
    c1 = np.uint32(np.uint64(position) >> _HALF)
    c2, c3 = np.uint32(0), np.uint32(0)
    k0 = np.uint32(np.uint64(seed) & _LOW)
    k1 = np.uint32(np.uint64(seed) >> _HALF)
    for _ in range(NUM_ROUNDS):
        product_0 = MULTIPLIER_0 * np.uint64(c0)
        product_2 = MULTIPLIER_2 * np.uint64(c2)
        c0 = np.uint32(np.uint32(product_2 >> _HALF) ^ c1 ^ k0)
        c2 = np.uint32(np.uint32(product_0 >> _HALF) ^ c3 ^ k1)
        c1 = np.uint32(product_2 & _LOW)
        c3 = np.uint32(product_0 & _LOW)
        k0 = np.uint32(k0 + INCREMENT_0)
        k1 = np.uint32(k1 + INCREMENT_1)
    return c0


@vectorised()
def acceptance_uniform(seed: Any, position: Any) -> Any:
    """Return the float32 uniform in (0, 1) that vLLM compares a draft token's ratio with."""
    signed = np.int32(philox_4x32(seed, position))
    magnitude = np.int32(~signed) if signed < 0 else signed
    return max(np.float32(magnitude) * UNIFORM_SCALE, UNIFORM_SCALE)
