"""Settings shared by all tests."""

from __future__ import annotations

from hypothesis import settings

# Machines that run the tests are slow and shared: an example's duration says nothing.
settings.register_profile("default", deadline=None)
settings.load_profile("default")
