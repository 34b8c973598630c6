"""Drafter checkpoints in the form vLLM's ``dspark`` method loads.

A folder with ``config.json`` and ``model.safetensors``. Tensors are bfloat16, except the
confidence head (float32, as vLLM keeps it) and ``d2t`` (int64): draft token i is target
token i + d2t[i]. The token embedding is not in the file: it is the target's.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from specbench.cache import write_bytes_atomically, write_text_atomically
from specbench.errors import InputError
from specbench.training.drafter_config import DrafterConfig
from specbench.training.drafter_model import DSparkDrafter

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
_D2T = "d2t"
_FLOAT32_PREFIX = "confidence_head."
# Written by other trainers for their own use; vLLM does not read it either.
_IGNORED = {"t2d"}


def load_drafter(path: Path, target_embedding: torch.Tensor) -> DSparkDrafter:
    """Read a checkpoint folder; weights become float32.

    Args:
        path: folder with config and weights.
        target_embedding: [vocab_size, hidden_size], the target's token embedding.

    Raises:
        InputError: the folder is incomplete or damaged, or does not fit the target.
    """
    config = DrafterConfig.from_json(path / CONFIG_NAME)
    weights = path / WEIGHTS_NAME
    try:
        tensors = load_file(weights)
    except (OSError, SafetensorError) as problem:
        raise InputError(f"{weights}: cannot be read as drafter weights: {problem}") from problem
    expected = (config.vocab_size, config.hidden_size)
    if tuple(target_embedding.shape) != expected:
        raise InputError(
            f"{path}: made for a target with an embedding of {expected[0]} x {expected[1]}, "
            f"not {' x '.join(map(str, target_embedding.shape))}; choose the target it was "
            "trained for"
        )
    tensors = {name: tensor for name, tensor in tensors.items() if name not in _IGNORED}
    ids = _draft_token_ids(config, tensors.get(_D2T), weights)
    drafter = DSparkDrafter(config, target_embedding, ids)
    _check_tensors(drafter, tensors, weights)
    drafter.load_state_dict(tensors)
    return drafter


def save_drafter(path: Path, drafter: DSparkDrafter) -> None:
    """Write a checkpoint folder; each file is replaced in one step.

    Raises:
        EnvironmentProblem: the folder cannot be written or the disk is full.
    """
    tensors = {}
    for name, tensor in drafter.state_dict().items():
        keeps = name == _D2T or name.startswith(_FLOAT32_PREFIX)
        dtype = tensor.dtype if name == _D2T else torch.float32 if keeps else torch.bfloat16
        tensors[name] = tensor.detach().to("cpu", dtype).contiguous()
    write_text_atomically(path / CONFIG_NAME, drafter.config.to_json())
    write_bytes_atomically(path / WEIGHTS_NAME, save(tensors, metadata={"format": "pt"}))


def _draft_token_ids(
    config: DrafterConfig, d2t: torch.Tensor | None, weights: Path
) -> torch.Tensor:
    """Target ids of the draft tokens, checked."""
    indices = torch.arange(config.draft_vocab_size)
    if d2t is None:
        if config.reduced_vocabulary:
            raise InputError(f"{weights}: d2t is missing, but the draft vocabulary is reduced")
        return indices
    if d2t.shape != indices.shape or d2t.is_floating_point():
        raise InputError(f"{weights}: d2t must hold {config.draft_vocab_size} integers")
    ids = indices + d2t.long()
    ascending = bool((ids[1:] > ids[:-1]).all())
    if not ascending or int(ids[0]) < 0 or int(ids[-1]) >= config.vocab_size:
        raise InputError(f"{weights}: d2t does not map to ascending tokens of the vocabulary")
    return ids


def _check_tensors(drafter: DSparkDrafter, tensors: dict[str, torch.Tensor], weights: Path) -> None:
    """Names and shapes must be exactly those of the module."""
    wanted = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if not drafter.config.reduced_vocabulary:
        found.pop(_D2T, None)
        tensors.pop(_D2T, None)
    for word, names in (("missing", wanted.keys() - found), ("not known", found.keys() - wanted)):
        if names:
            raise InputError(f"{weights}: tensors {word}: {', '.join(sorted(names))}")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise InputError(f"{weights}: {name} has shape {found[name]}, config says {shape}")
