"""The target model as training sees it: frozen, with the hidden states that a drafter reads.

Transformers runs it rather than the engine, because training needs hidden states of every
position and gradients never; the numbers agree with the engine's up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from specbench.engines.model_cache import resolve_model
from specbench.errors import EnvironmentProblem, InputError, UsageError

# Types whose decoder is embedding, layers, final norm, unscaled lm_head: what a drafter that
# shares embedding and teacher logits relies on. Others differ (logit scaling, soft-capping).
SUPPORTED_TYPES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class TargetHidden:
    """Hidden states of one forward pass.

    Attributes:
        aux_hidden: [num_sequences, length, num_layers * hidden], the outputs of the chosen
            layers side by side, in the order of the layer ids.
        final_hidden: [num_sequences, length, hidden], after the final norm: what lm_head reads.
    """

    aux_hidden: Tensor
    final_hidden: Tensor


class TargetModel:
    """A frozen causal language model of Llama or Qwen type.

    Attributes:
        config: the transformers configuration.
        fingerprint: names the weights; goes into every shard made from them.
        embedding: [vocab, hidden] token embedding.
        lm_head_weight: [vocab, hidden]; the same tensor as ``embedding`` where they are tied.
        final_norm: the module between the last layer and ``lm_head``.
    """

    def __init__(self, model: Any, fingerprint: str) -> None:
        """Freeze ``model``, a transformers ``*ForCausalLM`` of a supported type.

        Raises:
            InputError: a type other than Llama or Qwen.
        """
        check_type(model.config)
        self._model = model.requires_grad_(False).eval()
        self._decoder = model.model
        self.config: Any = model.config
        self.fingerprint = fingerprint
        self.embedding: Tensor = model.get_input_embeddings().weight
        self.lm_head_weight: Tensor = model.get_output_embeddings().weight
        self.final_norm: nn.Module = self._decoder.norm

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return int(self.config.num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        """Width of a hidden state."""
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """Rows of ``lm_head``; token ids are below this."""
        return self.lm_head_weight.shape[0]

    @property
    def max_tokens(self) -> int:
        """Longest sequence that the position encoding was made for."""
        return int(self.config.max_position_embeddings)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the weights."""
        return self.embedding.dtype

    def check_layer_ids(self, layer_ids: Sequence[int]) -> None:
        """Make sure that every id names a layer and none comes twice.

        Raises:
            UsageError: an id outside 0..num_layers-1, a repeated one, or no id at all.
        """
        wrong = [layer for layer in layer_ids if not 0 <= layer < self.num_layers]
        if wrong or not layer_ids or len(set(layer_ids)) != len(layer_ids):
            raise UsageError(
                f"target layer ids {list(layer_ids)}: give different ids between 0 and "
                f"{self.num_layers - 1}, the layers of this target"
            )

    @torch.no_grad()
    def forward(self, token_ids: Tensor, layer_ids: Sequence[int]) -> TargetHidden:
        """Hidden states of a batch of sequences.

        Sequences shorter than the batch are padded on the right with any token. No mask is
        needed then: attention is causal, so no real position looks at the padding, positions
        count from 0, and the attention keeps its fast causal form.

        Layer id i means the output of layer i before any norm, also for the last layer
        (transformers lists that one only after the final norm, the engine before it).

        Args:
            token_ids: [num_sequences, length] integers below ``vocab_size``.
            layer_ids: which layers' outputs to return; see :meth:`check_layer_ids`.
        """
        outputs: dict[int, Tensor] = {}
        hooks = [
            self._decoder.layers[layer].register_forward_hook(_keep_output(outputs, layer))
            for layer in layer_ids
        ]
        try:
            result = self._decoder(input_ids=token_ids.to(self.device), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        aux_hidden = torch.cat([outputs[layer] for layer in layer_ids], dim=-1)
        return TargetHidden(aux_hidden, result.last_hidden_state)

    @torch.no_grad()
    def logits(self, final_hidden: Tensor) -> Tensor:
        """Next-token logits, float32 [num_rows, vocab], of final hidden states [num_rows, hidden].

        Multiplied in the weights' own format and widened afterwards, as the engine does: near
        ties then break the same way.
        """
        return nn.functional.linear(final_hidden, self.lm_head_weight).float()


def load_target(
    model: str | None = None,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> TargetModel:
    """Load a target for training.

    Args:
        model: None for the embedded default, else a folder or a hub id.
        device: where to put the weights.
        dtype: number format; bfloat16 is what the engine serves.

    Raises:
        InputError: no such model, it cannot be loaded, or it is of another type.
        EnvironmentProblem: the embedded default cannot be prepared, or the device is absent.
    """
    # Deferred: importing transformers takes seconds, which a mistyped option should not cost.
    from transformers import AutoConfig, AutoModelForCausalLM

    reference = resolve_model(model)
    _check_device(torch.device(device))
    try:
        config = AutoConfig.from_pretrained(reference.path_or_id)
        check_type(config)
        loaded = AutoModelForCausalLM.from_pretrained(
            reference.path_or_id, config=config, dtype=dtype
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as problem:
        reason = (str(problem).strip().splitlines() or ["unknown reason"])[0]
        raise InputError(
            f"target {reference.path_or_id} cannot be loaded for training: {reason}"
        ) from problem
    return TargetModel(loaded.to(device), reference.fingerprint)


def check_type(config: Any) -> None:
    """Refuse a target whose structure training does not know.

    Raises:
        InputError: a model type outside :data:`SUPPORTED_TYPES`.
    """
    model_type = getattr(config, "model_type", None)
    if model_type not in SUPPORTED_TYPES:
        raise InputError(
            f"a drafter cannot be trained for a target of type {model_type!r}; "
            f"choose one of type {', '.join(SUPPORTED_TYPES)}"
        )


def _check_device(device: torch.device) -> None:
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EnvironmentProblem(
            "no CUDA device is usable here; train on the CPU or install a CUDA build of torch"
        )


def _keep_output(outputs: dict[int, Tensor], layer: int) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        # Some releases of transformers return a tuple whose first entry is the hidden state.
        outputs[layer] = output[0] if isinstance(output, tuple) else output

    return hook
