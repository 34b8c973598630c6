"""Graded n-gram chains: what the lookup proposed and how much of it the target accepted."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbench.errors import InputError

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

_INTEGERS = ("match_length", "num_accepted", "chain_length", "num_occurrences", "num_agreeing")
_FLOATS = ("recent_acceptance", "temperature")


@dataclass(frozen=True)
class NgramChains:
    """One row a chain; all arrays [num_chains], converted and checked on construction.

    Attributes:
        match_length: tokens of the matched suffix; 0 where nothing matched.
        num_accepted: leading tokens of the chain that the target emitted as well.
        chain_length: proposed tokens that can be graded: a chain that runs past the end of
            the response is cut there, since nobody knows what would have followed.
        num_occurrences: earlier occurrences of the matched n-gram.
        num_agreeing: of those, how many continue with the chain's first token.
        recent_acceptance: share of this request's recent n-gram tokens that were accepted,
            in [0, 1]; NaN while there is none.
        in_prompt: whether the match lies in the prompt.
        temperature: the request's sampling temperature.
        group: prompt of every chain (any labels); splits never cut through a group.

    Raises:
        InputError: lengths differ or values contradict each other.
    """

    match_length: IntArray
    num_accepted: IntArray
    chain_length: IntArray
    num_occurrences: IntArray | None = None
    num_agreeing: IntArray | None = None
    recent_acceptance: FloatArray | None = None
    in_prompt: NDArray[np.bool_] | None = None
    temperature: FloatArray | None = None
    group: NDArray[Any] | None = None

    def __post_init__(self) -> None:
        for name in self._given():
            object.__setattr__(self, name, _convert(name, getattr(self, name)))
        lengths = {name: len(getattr(self, name)) for name in self._given()}
        if len(set(lengths.values())) > 1:
            raise InputError(f"n-gram chains: columns of different lengths: {lengths}")
        self._check_values()

    def __len__(self) -> int:
        return int(self.match_length.size)

    def take(self, index: NDArray[Any]) -> NgramChains:
        """The rows of an index or boolean mask, in its order."""
        return NgramChains(**{name: getattr(self, name)[index] for name in self._given()})

    def _given(self) -> list[str]:
        return [field.name for field in fields(self) if getattr(self, field.name) is not None]

    def _check_values(self) -> None:
        for name in _INTEGERS:
            values = getattr(self, name)
            if values is not None:
                _refuse(values < 0, f"{name} is negative")
        _refuse(self.num_accepted > self.chain_length, "more tokens accepted than proposed")
        _refuse((self.match_length == 0) & (self.chain_length > 0), "a chain without a match")
        if (self.num_occurrences is None) != (self.num_agreeing is None):
            raise InputError("n-gram chains: give num_occurrences and num_agreeing, or neither")
        if self.num_occurrences is not None and self.num_agreeing is not None:
            _refuse(self.num_agreeing > self.num_occurrences, "num_agreeing > num_occurrences")
        if self.recent_acceptance is not None:
            recent = self.recent_acceptance
            is_bad = ~np.isnan(recent) & ~((recent >= 0) & (recent <= 1))
            _refuse(is_bad, "recent_acceptance is neither NaN nor within 0 to 1")
        if self.temperature is not None:
            is_bad = ~(np.isfinite(self.temperature) & (self.temperature >= 0))
            _refuse(is_bad, "temperature is negative or not finite")


def _convert(name: str, values: Any) -> NDArray[Any]:
    array = np.asarray(values)
    if array.ndim != 1:
        raise InputError(f"n-gram chains: {name} must have one dimension, got {array.shape}")
    try:
        if name in _INTEGERS:
            return array.astype(np.int64, casting="same_kind" if array.size else "unsafe")
        if name in _FLOATS:
            return array.astype(np.float64)
        return array.astype(np.bool_) if name == "in_prompt" else array
    except (TypeError, ValueError) as problem:
        raise InputError(f"n-gram chains: {name} has the wrong type {array.dtype}") from problem


def _refuse(is_bad: NDArray[np.bool_], what: str) -> None:
    if is_bad.any():
        raise InputError(f"n-gram chains, row {int(is_bad.argmax())}: {what}")
