"""specbench: adaptive speculative decoding policies on vLLM, calibrated, tuned and measured."""

__version__ = "0.1.0"
