from __future__ import annotations

from pathlib import Path

import pytest

from specbench.engines.config import default_log_file, parse_engine_args
from specbench.errors import UsageError


def test_values_are_json_where_they_can_be() -> None:
    assert parse_engine_args(
        [
            "gpu-memory-utilization=0.5",
            "enable_prefix_caching=false",
            'hf_overrides={"a": [1, 2]}',
            "load_format=dummy",
            "--revision=v1=2",
            "empty=",
        ]
    ) == {
        "gpu_memory_utilization": 0.5,
        "enable_prefix_caching": False,
        "hf_overrides": {"a": [1, 2]},
        "load_format": "dummy",
        "revision": "v1=2",
        "empty": "",
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["seed"], "expected key=value"),
        (["=3"], "expected key=value"),
        (["a b=3"], "expected key=value"),
        (["seed=1", "seed=2"], "given twice"),
        (["max-model-len=5"], "use --max-model-len instead"),
        (["speculative_config={}"], "use --drafter and --num-speculative-tokens"),
    ],
)
def test_what_cannot_be_passed_on_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_engine_args(words)


def test_log_file_lies_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    assert default_log_file().parent == tmp_path / "logs"
    assert not default_log_file().parent.exists()
