"""``specbench drafter``: help at once, and one line for whatever is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from specbench.cli.app import main

COMMANDS = ("generate", "features", "train", "evaluate", "export", "retrain")


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run ``specbench drafter ARGUMENTS`` in this process; returns the exit code."""
    monkeypatch.setattr(sys, "argv", ["specbench", "drafter", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    code = stop.value.code
    assert isinstance(code, int)
    return code


def test_help_of_all_commands_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys\n"
        "from specbench.cli.app import main\n"
        f"for name in {COMMANDS!r}:\n"
        "    sys.argv = ['specbench', 'drafter', name, '--help']\n"
        "    try: main()\n"
        "    except SystemExit as stop: print(stop.code, file=sys.stderr)\n"
        "heavy = {'torch', 'vllm', 'transformers', 'polars'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stderr.splitlines() == ["0"] * len(COMMANDS) + ["[]"]
    for name in COMMANDS:
        assert f"specbench drafter {name}" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["features"], "no responses; run `specbench drafter generate` first"),
        (["features", "--splits", "train,valid"], "split 'valid' is unknown"),
        (["generate", "--num-prompts", "3"], "belong to --prompts"),
        (["generate", "--temperature", "0"], "belong to --prompts"),
        (["generate", "--prompts", "a.jsonl", "--num-tokens", "9"], "--num-prompts"),
        (["generate", "--prompts", "missing.jsonl"], "missing.jsonl"),
        (["generate", "--prompts", "code-edit", "--temperature", "-1"], "--temperature"),
        (["train", "--run", "r"], "either --epochs or --minutes"),
        (["train", "--run", "r", "--minutes", "0"], "above 0"),
        (["train", "--run", "r", "--minutes", "1", "--optimizer", "sgd"], "muon or adamw"),
        (["train", "--run", "r", "--minutes", "1", "--learning-rate", "0"], "learning rate"),
        (["train", "--run", "r", "--epochs", "1", "--block-lengths", "x"], "--block-lengths"),
        (["train", "--run", "a/b", "--epochs", "1"], "plain name"),
        (["retrain", "--minutes", "1", "--epochs", "1"], "not both"),
        (["export", "--run", "r", "--output", "o"], "no finished drafter"),
        (["export", "--run", "..", "--output", "o"], "plain name"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_main(monkeypatch, *arguments, "--workdir", str(tmp_path / "w")) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert words in lines[0]
