"""What vLLM is told, on a CPU and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specbench.engines.arguments import engine_arguments
from specbench.engines.config import EngineConfig
from specbench.engines.model_cache import DrafterRef, ModelRef
from specbench.errors import UsageError

CONFIG = EngineConfig(model=None, drafter=None, max_num_seqs=16, log_file=Path("engine.log"))
TARGET = ModelRef("/models/target", "a" * 64, is_default=True)
DRAFTER = DrafterRef("/models/drafter", "b" * 64, is_default=True)


def test_cpu_engine_with_a_drafter():
    arguments = engine_arguments(CONFIG, TARGET, DRAFTER, on_cpu=True)
    assert arguments["worker_cls"].endswith("PolicyCPUWorker")
    assert arguments["speculative_config"]["method"] == "dspark"
    assert "enable_adaptive_verification" not in arguments["speculative_config"]
    assert arguments["enforce_eager"]


def test_gpu_engine_lets_vllm_capture_ragged_graphs():
    arguments = engine_arguments(CONFIG, TARGET, DRAFTER, on_cpu=False)
    assert arguments["worker_cls"].endswith("PolicyGPUWorker")
    assert arguments["speculative_config"]["enable_adaptive_verification"]
    assert "enforce_eager" not in arguments


def test_gpu_without_a_drafter_is_refused():
    with pytest.raises(UsageError, match="--drafter"):
        engine_arguments(CONFIG, TARGET, None, on_cpu=False)


def test_plain_engine_has_no_speculation():
    arguments = engine_arguments(replace(CONFIG, plain="v1"), TARGET, DRAFTER, on_cpu=True)
    assert "speculative_config" not in arguments
    assert "worker_cls" not in arguments


def test_engine_args_win_and_additional_config_is_merged():
    given = {"max_num_seqs": 3, "additional_config": {"other": 1}}
    config = replace(CONFIG, engine_args=given, plugin_settings={"budget_staleness": 1})
    arguments = engine_arguments(config, TARGET, None, on_cpu=True)
    assert arguments["max_num_seqs"] == 3
    assert arguments["additional_config"] == {"specbench": {"budget_staleness": 1}, "other": 1}


def test_pipeline_parallel_engines_are_refused():
    config = replace(CONFIG, engine_args={"pipeline_parallel_size": 2})
    with pytest.raises(UsageError, match="pipeline"):
        engine_arguments(config, TARGET, DRAFTER, on_cpu=True)


@pytest.mark.parametrize(
    ("config", "num_slots"),
    [('{"block_size": 7}', 16), ('{"block_size": 24}', 24), ('{"dspark_block_size": 20}', 20)],
)
def test_a_request_has_16_slots_or_the_drafters_block(
    tmp_path: Path, config: str, num_slots: int
) -> None:
    (tmp_path / "config.json").write_text(config)
    drafter = DrafterRef(str(tmp_path), "b" * 64, is_default=False)
    arguments = engine_arguments(CONFIG, TARGET, drafter, on_cpu=True)
    assert arguments["speculative_config"]["num_speculative_tokens"] == num_slots
    given = replace(CONFIG, num_speculative_tokens=5)
    arguments = engine_arguments(given, TARGET, drafter, on_cpu=True)
    assert arguments["speculative_config"]["num_speculative_tokens"] == 5


def test_the_block_of_a_hub_id_is_left_to_vllm() -> None:
    drafter = DrafterRef("owner/drafter", "b" * 64, is_default=False)
    arguments = engine_arguments(CONFIG, TARGET, drafter, on_cpu=True)
    assert "num_speculative_tokens" not in arguments["speculative_config"]


@pytest.mark.parametrize(("max_num_seqs", "expected"), [(16, None), (32, None), (256, 10_240)])
def test_a_step_has_room_for_every_requests_slots(max_num_seqs: int, expected: int | None) -> None:
    config = replace(CONFIG, max_num_seqs=max_num_seqs)
    arguments = engine_arguments(config, TARGET, None, on_cpu=True)
    assert arguments["max_num_batched_tokens"] == expected
