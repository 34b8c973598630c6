"""Result files: the JSON document (see docs/results-format.md) and Parquet records."""
