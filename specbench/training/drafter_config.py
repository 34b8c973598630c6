"""The shape of a DSpark drafter, and the ``config.json`` that vLLM's ``dspark`` method reads."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from specbench.errors import InputError

# Targets whose block is attention + SiLU-gated MLP with RMSNorm: the drafter copies its sizes.
TARGET_MODEL_TYPES = ("llama", "qwen2", "qwen3")

# DSpark and DFlash checkpoints published for 8B targets read five layers; the embedded drafter too.
NUM_TARGET_LAYER_IDS = 5

# What vLLM's Qwen3 DSpark model supports of these keys and this module implements; a
# checkpoint that says otherwise would be drafted with a different model than was trained.
_FIXED: dict[str, Any] = {
    "model_type": "qwen3",
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "markov_head_type": "vanilla",
    "sample_from_anchor": True,
    "dspark_bonus_anchor": False,
}
# Without these vLLM would build a smaller model or none: absence is not agreement.
_MUST_BE_SAID = ("model_type", "enable_confidence_head", "confidence_head_with_markov")
_ARCHITECTURE = "Qwen3DSparkModel"


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes and ids of one drafter; all of ``config.json`` follows from them.

    Attributes:
        hidden_size: width of the drafter, equal to the target's (they share the embedding).
        intermediate_size: inner width of the gated MLP.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads; divides ``num_attention_heads``.
        head_dim: width of one head; even, as rotary embedding pairs its halves.
        num_hidden_layers: drafter layers.
        vocab_size: the target's vocabulary.
        draft_vocab_size: tokens the drafter can propose.
        rms_norm_eps: epsilon of every RMSNorm.
        rope_theta: base of the drafter's own rotary embedding (unscaled).
        max_position_embeddings: longest sequence, in tokens.
        block_size: tokens drafted in one pass.
        mask_token_id: token whose embedding stands for a position still to be drafted;
            one that never occurs in text.
        target_layer_ids: ascending; id i reads the target's hidden state after layer i.
        num_target_layers: layers of the target.
        markov_rank: rank of the transition bias between neighbouring tokens.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_hidden_layers: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    markov_rank: int

    def __post_init__(self) -> None:
        problem = _problem(self)
        if problem:
            raise InputError(f"drafter config: {problem}")

    @property
    def feature_size(self) -> int:
        """Width of the target features of one token: all tapped layers side by side."""
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def reduced_vocabulary(self) -> bool:
        """Whether the drafter proposes from fewer tokens than the target knows."""
        return self.draft_vocab_size < self.vocab_size

    @classmethod
    def from_target(
        cls,
        target: Mapping[str, Any],
        *,
        num_layers: int,
        block_size: int,
        markov_rank: int,
        draft_vocab_size: int,
        mask_token_id: int,
        target_layer_ids: Sequence[int] | None = None,
    ) -> DrafterConfig:
        """A drafter for a Llama- or Qwen-type target.

        The rotary embedding is the drafter's own: it takes the target's base but not its
        long-context scaling.

        Args:
            target: the target's ``config.json`` (or ``config.to_dict()``).
            num_layers: drafter layers.
            block_size: tokens drafted in one pass.
            markov_rank: rank of the transition bias.
            draft_vocab_size: tokens the drafter can propose, at most the target's vocabulary.
            mask_token_id: a reserved token of the target's vocabulary.
            target_layer_ids: layers to read; default :func:`default_target_layer_ids`.

        Raises:
            InputError: a target of another type, or sizes that do not fit together.
        """
        if target.get("model_type") not in TARGET_MODEL_TYPES:
            raise InputError(
                f"target of type {target.get('model_type')!r}: a drafter can be trained for "
                f"{', '.join(TARGET_MODEL_TYPES)}; choose such a target"
            )
        hidden_size = int(_need(target, "hidden_size", "target config"))
        num_heads = int(_need(target, "num_attention_heads", "target config"))
        num_target_layers = int(_need(target, "num_hidden_layers", "target config"))
        layer_ids = target_layer_ids or default_target_layer_ids(num_target_layers)
        return cls(
            hidden_size=hidden_size,
            intermediate_size=int(_need(target, "intermediate_size", "target config")),
            num_attention_heads=num_heads,
            num_key_value_heads=int(target.get("num_key_value_heads") or num_heads),
            head_dim=int(target.get("head_dim") or hidden_size // num_heads),
            num_hidden_layers=num_layers,
            vocab_size=int(_need(target, "vocab_size", "target config")),
            draft_vocab_size=draft_vocab_size,
            rms_norm_eps=float(_need(target, "rms_norm_eps", "target config")),
            rope_theta=_rope_theta(target, "target config"),
            max_position_embeddings=int(_need(target, "max_position_embeddings", "target config")),
            block_size=block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=tuple(layer_ids),
            num_target_layers=num_target_layers,
            markov_rank=markov_rank,
        )

    @classmethod
    def from_json(cls, path: Path) -> DrafterConfig:
        """Read ``config.json``.

        Raises:
            InputError: unreadable, incomplete, or a kind of drafter this module does not build.
        """
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as problem:
            raise InputError(f"{path}: cannot be read as a drafter config: {problem}") from problem
        if not isinstance(raw, dict):
            raise InputError(f"{path}: a drafter config must be a JSON object")
        try:
            return _from_mapping(cls, raw, str(path))
        except (TypeError, ValueError) as problem:
            raise InputError(f"{path}: a value has the wrong type: {problem}") from problem

    def to_mapping(self) -> dict[str, Any]:
        """The content of ``config.json`` for vLLM's ``dspark`` method.

        ``mask_token_id`` and ``target_layer_ids`` appear twice: the part of vLLM shared
        with DFlash looks into ``dflash_config`` first, other parts read the top level.
        """
        layer_ids = list(self.target_layer_ids)
        return {
            "architectures": [_ARCHITECTURE],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": self.num_hidden_layers,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "attention_bias": False,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": layer_ids,
            "num_target_layers": self.num_target_layers,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "markov_rank": self.markov_rank,
            "markov_head_type": "vanilla",
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
            "dflash_config": {"mask_token_id": self.mask_token_id, "target_layer_ids": layer_ids},
        }

    def to_json(self) -> str:
        """``config.json`` as text, one space of indentation, no final newline."""
        return json.dumps(self.to_mapping(), indent=1)


def default_target_layer_ids(num_target_layers: int) -> tuple[int, ...]:
    """Layers to read, evenly spaced from the second to the last but one.

    The last layer is left out: its output exists only after the final norm in most
    implementations, and the drafter reads hidden states before it.

    Raises:
        InputError: the target has too few layers.
    """
    first, last = 1, num_target_layers - 2
    if last - first < NUM_TARGET_LAYER_IDS - 1:
        raise InputError(
            f"a target of {num_target_layers} layers is too shallow for "
            f"{NUM_TARGET_LAYER_IDS} layer ids; name target_layer_ids"
        )
    gaps = NUM_TARGET_LAYER_IDS - 1
    return tuple(first + math.ceil(i * (last - first) / gaps) for i in range(gaps + 1))


def _problem(config: DrafterConfig) -> str | None:
    """What is wrong with the sizes, None if nothing is."""
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in ("target_layer_ids", "mask_token_id") and not value > 0:
            return f"{field.name} must be positive, got {value!r}"
    if config.num_attention_heads % config.num_key_value_heads:
        return (
            f"{config.num_attention_heads} attention heads cannot share "
            f"{config.num_key_value_heads} key-value heads evenly"
        )
    if config.head_dim % 2:
        return f"head_dim must be even, got {config.head_dim}"
    if config.draft_vocab_size > config.vocab_size:
        return (
            f"draft_vocab_size {config.draft_vocab_size} is larger than the vocabulary "
            f"({config.vocab_size})"
        )
    if not 0 <= config.mask_token_id < config.vocab_size:
        return f"mask_token_id {config.mask_token_id} is outside the vocabulary"
    ids = list(config.target_layer_ids)
    # The last layer's raw output is not observable everywhere; see default_target_layer_ids.
    highest = config.num_target_layers - 2
    if not ids or ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] > highest:
        return f"target_layer_ids must ascend within 0..{highest}, got {ids}"
    return None


def _from_mapping(cls: type[DrafterConfig], raw: Mapping[str, Any], where: str) -> DrafterConfig:
    _check_kind(raw, where)
    nested = raw.get("dflash_config") or {}
    layer_ids = nested.get("target_layer_ids", raw.get("target_layer_ids"))
    mask = nested.get("mask_token_id", raw.get("mask_token_id"))
    if layer_ids is None or mask is None:
        raise InputError(f"{where}: target_layer_ids and mask_token_id are needed")
    integers = {
        name: int(_need(raw, name, where))
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "num_hidden_layers",
            "vocab_size",
            "max_position_embeddings",
            "block_size",
            "num_target_layers",
            "markov_rank",
        )
    }
    return cls(
        **integers,
        # vLLM takes a missing draft vocabulary for the full one.
        draft_vocab_size=int(raw.get("draft_vocab_size") or integers["vocab_size"]),
        rms_norm_eps=float(_need(raw, "rms_norm_eps", where)),
        rope_theta=_rope_theta(raw, where, unscaled=True),
        mask_token_id=int(mask),
        target_layer_ids=tuple(int(layer_id) for layer_id in layer_ids),
    )


def _check_kind(raw: Mapping[str, Any], where: str) -> None:
    if _ARCHITECTURE not in (raw.get("architectures") or []):
        raise InputError(f"{where}: architectures must name {_ARCHITECTURE}")
    for key, value in _FIXED.items():
        if key in _MUST_BE_SAID and key not in raw:
            raise InputError(f"{where}: {key} is missing; it must be {value!r}")
        if raw.get(key, value) != value:
            raise InputError(f"{where}: {key} = {raw[key]!r} is not supported, only {value!r}")
    if any(kind != "full_attention" for kind in raw.get("layer_types") or []):
        raise InputError(f"{where}: layer_types other than full_attention are not supported")


def _need(raw: Mapping[str, Any], key: str, where: str) -> Any:
    if raw.get(key) is None:
        raise InputError(f"{where}: {key} is missing")
    return raw[key]


def _rope_theta(raw: Mapping[str, Any], where: str, *, unscaled: bool = False) -> float:
    """Base of the rotary embedding, from either place it is kept in."""
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if unscaled and parameters.get("rope_type", "default") != "default":
        raise InputError(f"{where}: rope_type {parameters['rope_type']!r} is not supported")
    theta = parameters.get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise InputError(f"{where}: rope_theta is missing")
    return float(theta)
