"""Engines that serve requests, and the models they load: vLLM, and stand-ins for tests."""
