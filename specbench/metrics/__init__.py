"""What is computed from records: pure functions, one formula each (see docs/metrics.md)."""
