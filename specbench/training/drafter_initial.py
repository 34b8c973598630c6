"""Weights to start from: a new drafter, or an old one with another draft vocabulary."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from specbench.errors import InputError
from specbench.training.drafter_config import DrafterConfig
from specbench.training.drafter_model import DSparkDrafter

# Standard deviation that Llama- and Qwen-type models are initialised with
# (``initializer_range`` of their configs).
INITIAL_STD = 0.02


def choose_draft_vocab(counts: torch.Tensor, size: int) -> torch.Tensor:
    """The ``size`` most frequent tokens, ascending ids, [size] int64.

    Ties go to the smaller id, so that equal counts give equal vocabularies everywhere.

    Args:
        counts: [vocab_size], how often each token occurs in the training responses.
        size: tokens to keep, 1..vocab_size.

    Raises:
        InputError: ``size`` does not lie in that range.
    """
    if not 1 <= size <= counts.shape[0]:
        raise InputError(
            f"a draft vocabulary of {size} tokens cannot be chosen from {counts.shape[0]}"
        )
    by_count = torch.sort(counts, descending=True, stable=True).indices
    return by_count[:size].sort().values


def new_drafter(
    config: DrafterConfig,
    target_embedding: torch.Tensor,
    target_lm_head: torch.Tensor,
    draft_token_ids: torch.Tensor,
    seed: int,
) -> DSparkDrafter:
    """A drafter before training.

    The context projection starts as the mean of the tapped layers plus noise, the output
    head as the target's rows, the transition bias and the confidence at zero, and what each
    sublayer adds to the residual stream small (GPT-2's 1 / sqrt(2 layers) rule), so that
    early gradients reach the parts that have to be learnt.

    Args:
        config: sizes.
        target_embedding: [vocab_size, hidden_size].
        target_lm_head: [vocab_size, hidden_size].
        draft_token_ids: [draft_vocab_size] int64, ascending target ids.
        seed: of the random weights.
    """
    drafter = DSparkDrafter(config, target_embedding, draft_token_ids)
    generator = torch.Generator().manual_seed(seed)
    residual_std = INITIAL_STD * (2 * config.num_hidden_layers) ** -0.5
    with torch.no_grad():
        for name, module in drafter.layers.named_modules():
            if isinstance(module, nn.Linear):
                adds_to_residual = name.endswith(("o_proj", "down_proj"))
                std = residual_std if adds_to_residual else INITIAL_STD
                module.weight.normal_(0.0, std, generator=generator)
        _start_context_projection(drafter, generator)
        drafter.lm_head.weight.copy_(target_lm_head[draft_token_ids])
        # Unit length in expectation: with w2 at zero the bias starts at none, yet w2 learns.
        std = config.markov_rank**-0.5
        drafter.markov_head.markov_w1.weight.normal_(0.0, std, generator=generator)
        drafter.markov_head.markov_w2.weight.zero_()
        drafter.confidence_head.proj.weight.zero_()
        drafter.confidence_head.proj.bias.zero_()
    return drafter


def _start_context_projection(drafter: DSparkDrafter, generator: torch.Generator) -> None:
    num_taps, hidden_size = len(drafter.config.target_layer_ids), drafter.config.hidden_size
    weight = drafter.fc.weight
    weight.normal_(0.0, INITIAL_STD * num_taps**-0.5, generator=generator)
    for tap in range(num_taps):
        block = weight[:, tap * hidden_size : (tap + 1) * hidden_size]
        block.diagonal().add_(1.0 / num_taps)


def resize_draft_vocab(
    drafter: DSparkDrafter, new_token_ids: torch.Tensor, target_lm_head: torch.Tensor
) -> DSparkDrafter:
    """A copy of ``drafter`` that proposes from other tokens.

    Tokens in both vocabularies keep their trained rows; new ones start from the target's
    output rows, with no transition bias.

    Args:
        drafter: left as it is.
        new_token_ids: [new_draft_vocab_size] int64, ascending target ids.
        target_lm_head: [vocab_size, hidden_size].
    """
    ids = new_token_ids.to(drafter.d2t.device)
    config = replace(drafter.config, draft_vocab_size=ids.shape[0])
    resized = DSparkDrafter(config, drafter.embed_tokens, ids).to(drafter.fc.weight.device)
    old_rows = drafter.target_to_draft[ids]
    shared = old_rows >= 0
    with torch.no_grad():
        state = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
        state.pop("d2t", None)
        head = target_lm_head.to(ids.device)[ids].to(drafter.lm_head.weight.dtype)
        head[shared] = drafter.lm_head.weight[old_rows[shared]]
        bias = head.new_zeros(ids.shape[0], config.markov_rank)
        bias[shared] = drafter.markov_head.markov_w2.weight[old_rows[shared]]
        state["lm_head.weight"] = head
        state["markov_head.markov_w2.weight"] = bias
        if config.reduced_vocabulary:
            state["d2t"] = resized.d2t
    resized.load_state_dict(state)
    return resized
