from __future__ import annotations

import json

from specbench.results.environment import (
    describe_environment,
    installed_versions,
    redact,
    redact_command,
)


def test_environment_is_json_and_names_what_matters() -> None:
    environment = describe_environment({"model": "m", "path": object}, ["specbench", "run"])
    assert json.loads(json.dumps(environment, allow_nan=False)) == environment
    assert environment["command"] == ["specbench", "run"]
    assert environment["engine"]["model"] == "m"
    assert environment["processor"]
    assert environment["created_at"].endswith("+00:00")
    assert "numpy" in installed_versions()


def test_credentials_are_replaced_wherever_they_stand() -> None:
    command = ["x", "--engine-arg", "hf_token=a=b==", "--engine-arg=hf-token=abc", "seed=1"]
    assert redact_command(command) == [
        "x",
        "--engine-arg",
        "hf_token=<redacted>",
        "--engine-arg=hf-token=<redacted>",
        "seed=1",
    ]
    assert redact({"a": {"hf_token": "x"}, "api_key": None}) == {
        "a": {"hf_token": "<redacted>"},
        "api_key": None,
    }


def test_values_json_cannot_hold_are_made_fit() -> None:
    assert redact({"a": float("nan"), "b": (1, float("inf")), "c": 1.5}) == {
        "a": None,
        "b": [1, None],
        "c": 1.5,
    }
