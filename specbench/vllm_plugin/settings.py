"""What the engine is told through vLLM's ``additional_config["specbench"]``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from specbench.errors import UsageError


@dataclass(frozen=True)
class PluginSettings:
    """Settings of the plugin inside one engine.

    Attributes:
        policy: policy at start, ``name[:argument]``.
        budget_staleness: 0 sizes the verification budget from current confidences,
            1 from the previous step's, as asynchronous scheduling has to.
        ngram_min, ngram_max: shortest and longest suffix the n-gram lookup matches.
            2 to 8: a single token matches by coincidence, and acceptance stops rising at
            about 8 matched tokens on the embedded target's own outputs.
    """

    policy: str = "ar"
    budget_staleness: int = 0
    ngram_min: int = 2
    ngram_max: int = 8

    @classmethod
    def from_vllm_config(cls, vllm_config: Any) -> PluginSettings:
        """Read them from a VllmConfig; raises UsageError on an unknown key or bad value."""
        given = (vllm_config.additional_config or {}).get("specbench", {})
        if not isinstance(given, dict):
            raise UsageError("additional_config['specbench'] must be an object of settings")
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(given) - known):
            raise UsageError(f"unknown specbench setting {unknown[0]!r} (known: {sorted(known)})")
        settings = cls(**given)
        numbers = (settings.budget_staleness, settings.ngram_min, settings.ngram_max)
        if not all(type(number) is int for number in numbers):
            raise UsageError("budget_staleness, ngram_min and ngram_max must be whole numbers")
        if settings.budget_staleness not in (0, 1):
            raise UsageError("budget_staleness must be 0 or 1")
        if not 1 <= settings.ngram_min <= settings.ngram_max:
            raise UsageError("need 1 <= ngram_min <= ngram_max")
        return settings
