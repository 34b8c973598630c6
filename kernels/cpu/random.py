"""Gumbel-max sampling with vLLM's counter-based random streams.

A draw for token v of a request is a pure function of (seed, position, v): MurmurHash3 (32 bit,
Austin Appleby, public domain) over the seed's two words, the position and v. The hash, and the
formula from hash to noise, follow vLLM's sampler bit for bit, so that a seed gives the same
tokens here and on a GPU; only the last digit of a logarithm may differ.

A row is sampled without computing most of its noise. A token at distance d below the best value
so far can only win with noise of at least d, and noise = -log(-log(1-u)) <= -log(u), so its
uniform must satisfy u <= exp(-d): hashes above ``exp(-d) * 2**32`` are passed over. One bound
serves a block of the vocabulary, with d taken from the block's largest logit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specbench.kernels.cpu.compilation import inlined, vectorised
from specbench.kernels.cpu.floats import Array, widen
from specbench.kernels.cpu.rows import NEGATIVE_INFINITY, block_max, first_index

# Tokens per bound. Smaller blocks bound more tightly, larger ones vectorise better; flat between
# 64 and 512 on the machine this was measured on.
BLOCK_SIZE = 256
# MurmurHash3's constants; the last is vLLM's second stream, for 64-bit uniforms.
C1, C2 = np.uint32(0xCC9E2D51), np.uint32(0x1B873593)
FINAL_1, FINAL_2 = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
ADDEND = np.uint32(0xE6546B64)
HASHED_BYTES = np.uint32(16)  # four words: seed low, seed high, position, token
HIGH_WORD_DOMAIN = 0x9E3779B9
WORD = 0xFFFFFFFF
# vLLM shifts a drafter's positions so that its noise is independent of the target's.
DRAFT_NOISE_SALT = 1 << 30
# Largest noise: -log of the smallest uniform, 2**-33 (22.9), or 36.8 for 53-bit uniforms.
MAX_NOISE_32, MAX_NOISE_64 = 23.0, 37.0
# Slack of the bound for the rounding of noise (1e-6) and of logits (4 units in the last place).
NOISE_SLACK, LOGIT_SLACK = 1e-3, 5e-7


@inlined
def _mix(h: Any, key: Any) -> Any:
    """One MurmurHash3 round: absorb a 32-bit word."""
    k = np.uint32(np.uint32(key) * C1)
    k = np.uint32(np.uint32(k << np.uint32(15)) | np.uint32(k >> np.uint32(17)))
    k = np.uint32(k * C2)
    h = np.uint32(h ^ k)
    h = np.uint32(np.uint32(h << np.uint32(13)) | np.uint32(h >> np.uint32(19)))
    # 5 h as a shift and a sum: vector multiplication of 32-bit integers is slow.
    return np.uint32(np.uint32(np.uint32(h << np.uint32(2)) + h) + ADDEND)


@inlined
def _finish(h: Any) -> Any:
    """MurmurHash3's finaliser over sixteen absorbed bytes."""
    h = np.uint32(h ^ HASHED_BYTES)
    h = np.uint32(h ^ np.uint32(h >> np.uint32(16)))
    h = np.uint32(h * FINAL_1)
    h = np.uint32(h ^ np.uint32(h >> np.uint32(13)))
    h = np.uint32(h * FINAL_2)
    return np.uint32(h ^ np.uint32(h >> np.uint32(16)))


@vectorised()
def stream(seed: Any, position: Any, domain: Any) -> Any:
    """Hash state of a request's position, before the token is absorbed (compiled)."""
    h = _mix(np.uint32(domain), np.uint32(seed & WORD))
    h = _mix(h, np.uint32((seed >> 32) & WORD))
    return _mix(h, np.uint32(position & WORD))


@inlined
def token_hash(state: Any, token: Any) -> Any:
    """The 32 random bits of one token in a stream (compiled)."""
    return _finish(_mix(state, np.uint32(token)))


@vectorised()
def fill_hashes(state: Any, start: Any, inverted: Any, out: Array) -> Any:
    """out[i] = random bits of token start + i (complemented if ``inverted``); returns the least.

    out: uint32 (compiled).
    """
    flip = np.uint32(WORD) if inverted else np.uint32(0)
    first = np.uint32(start)
    least = np.uint32(WORD)
    for i in range(np.uint64(out.shape[0])):
        bits = np.uint32(token_hash(state, np.uint32(first + np.uint32(i))) ^ flip)
        out[i] = bits
        least = min(least, bits)
    return least


@vectorised()
def uniform32(bits: Any) -> Any:
    """(bits + 1/2) / 2**32 as float32, from exact halves (compiled)."""
    high = np.float32(np.uint32(bits >> np.uint32(16))) * np.float32(2.0**-16)
    low = np.float32(np.uint32(bits & np.uint32(0xFFFF)))
    return high + (low + np.float32(0.5)) * np.float32(2.0**-32)


@vectorised()
def uniform64(low: Any, high: Any) -> Any:
    """(b + 1/2) / 2**53 of the top 53 bits b of two words, below 1 (compiled)."""
    bits = np.uint64(np.uint64(np.uint64(high) << np.uint64(32)) | np.uint64(low))
    u = (np.float64(np.uint64(bits >> np.uint64(11))) + 0.5) * 2.0**-53
    return u - 2.0**-53 if u == 1.0 else u


@vectorised()
def gumbel32(bits: Any) -> Any:
    """-log(-log(1 - u)) in float32, with vLLM's series for log(1 - u) below u = 1/4 (compiled)."""
    u = uniform32(bits)
    if u < np.float32(0.25):
        p = np.float32(1.0 / 8.0)
        p = np.float32(1.0 / 7.0) + u * p
        p = np.float32(1.0 / 6.0) + u * p
        p = np.float32(1.0 / 5.0) + u * p
        p = np.float32(1.0 / 4.0) + u * p
        p = np.float32(1.0 / 3.0) + u * p
        p = np.float32(1.0 / 2.0) + u * p
        p = np.float32(1.0) + u * p
        tail = u * p
    else:
        # 2**-24 keeps the argument positive where 1 - u rounds to 0.
        tail = -np.log(max(np.float32(1.0) - u, np.float32(2.0**-24)))
    return -np.log(tail)


@vectorised()
def gumbel64(low: Any, high: Any) -> Any:
    """-log(-log(u)) of a 53-bit uniform (compiled)."""
    return -np.log(-np.log(uniform64(low, high)))


@vectorised()
def hash_limit(gap: Any, best: Any) -> Any:
    """Largest hash with which a logit ``gap`` below ``best`` could still win (compiled)."""
    gap -= NOISE_SLACK + LOGIT_SLACK * abs(best)
    # 512: the rounding of the product and of the uniform, many times over.
    limit = np.exp(-gap) * 4294967296.0 * (1.0 + NOISE_SLACK) + 512.0 if gap > 0.0 else 4.3e9
    return np.uint32(WORD) if limit >= 4294967295.0 else np.uint32(limit)


@vectorised()
def noisy_value(logit: Any, token: Any, seed: Any, position: Any, fp64: Any) -> Any:
    """Logit plus the token's Gumbel noise, summed in float32 or float64 (compiled)."""
    low = token_hash(stream(seed, position, 0), token)
    if fp64:
        high = token_hash(stream(seed, position, HIGH_WORD_DOMAIN), token)
        return np.float64(logit) + gumbel64(low, high)
    return np.float64(np.float32(logit + gumbel32(low)))


@vectorised()
def gumbel_argmax(row: Array, temperature: Any, seed: Any, position: Any, fp64: Any) -> Any:
    """Sample a token from softmax(row / temperature): argmax of row / temperature + noise.

    Compiled. ``row`` may hold -inf (never sampled unless all are). If +inf or NaN is the
    maximum, its first index is returned.

    Args:
        row: [vocab_size] float32 or bfloat16 bits.
        temperature: > 0.
        seed: int64 of the request.
        position: int64, including the salt of a drafter.
        fp64: draw and add the noise in float64.

    Returns:
        (token, value): int64 and float64.
    """
    temperature = np.float32(temperature)
    num_blocks = (row.shape[0] + BLOCK_SIZE - 1) // BLOCK_SIZE
    maxima = np.empty(num_blocks, np.float32)
    top = 0
    for b in range(num_blocks):
        maxima[b] = block_max(row[b * BLOCK_SIZE : (b + 1) * BLOCK_SIZE])
        # The first NaN stays on top: nothing compares greater.
        if maxima[b] > maxima[top] or (maxima[b] != maxima[b] and maxima[top] == maxima[top]):
            top = b
    start = top * BLOCK_SIZE
    token = start + first_index(row[start : start + BLOCK_SIZE], maxima[top])
    logit = widen(row[token]) / temperature
    if not abs(logit) < np.inf:
        return token, np.float64(logit)
    best = noisy_value(logit, token, seed, position, fp64)
    max_noise = MAX_NOISE_64 if fp64 else MAX_NOISE_32
    state = stream(seed, position, HIGH_WORD_DOMAIN if fp64 else 0)
    hashes = np.empty(BLOCK_SIZE, np.uint32)
    for b in range(num_blocks):
        gap = best - np.float64(maxima[b] / temperature)
        if maxima[b] == NEGATIVE_INFINITY or gap > max_noise + LOGIT_SLACK * abs(best):
            continue
        start = b * BLOCK_SIZE
        block = row[start : start + BLOCK_SIZE]
        limit = hash_limit(gap, best)
        # In float64 the noise grows with u, not with 1 - u: the complement's bound is the same.
        if fill_hashes(state, start, fp64, hashes[: block.shape[0]]) > limit:
            continue
        for i in range(np.uint64(block.shape[0])):
            if hashes[i] <= limit:
                candidate = start + np.int64(i)
                logit = widen(block[i]) / temperature
                value = noisy_value(logit, candidate, seed, position, fp64)
                if value > best or (value == best and candidate < token):
                    best = value
                    token = candidate
    return token, best
