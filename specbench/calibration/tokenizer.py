"""Name a tokenizer: an n-gram table holds for token sequences, so for one tokenizer only."""

from __future__ import annotations

import hashlib
from pathlib import Path

from specbench.engines.model_cache import fingerprint_hub_id
from specbench.errors import InputError

# What turns text into token ids and back, in the layouts that transformers writes.
_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
# One of these holds the vocabulary.
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def tokenizer_fingerprint(path_or_id: str) -> str:
    """64 hex digits that name the tokenizer of a model folder, or of a hub id.

    SHA-256 over name, size and content of each tokenizer file in name order. A hub id is
    named by itself, as its weights are: its files may not have been fetched yet.

    Raises:
        InputError: a folder without a vocabulary, or a file that cannot be read.
    """
    folder = Path(path_or_id)
    if not folder.is_dir():
        return fingerprint_hub_id(f"{path_or_id}#tokenizer")
    digest = hashlib.sha256()
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        raise InputError(f"{folder}: no tokenizer ({', '.join(_VOCABULARIES)}) in this folder")
    for name in _FILES:
        path = folder / name
        if not path.is_file():
            continue
        try:
            content = path.read_bytes()
        except OSError as problem:
            raise InputError(f"{path}: cannot be read ({problem.strerror})") from None
        digest.update(f"\0{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
