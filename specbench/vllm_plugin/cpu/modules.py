"""The modules that hold CPU twins; each has an OVERRIDES table by kernel name."""

from __future__ import annotations

from specbench.vllm_plugin.cpu import batch, drafting, estimator, sampling, verification

TWIN_MODULES = (batch, drafting, estimator, sampling, verification)
