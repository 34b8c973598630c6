"""The drafter that a training run starts with: a new one for a target, or an older checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from specbench.engines.model_cache import resolve_model
from specbench.errors import UsageError
from specbench.training.drafter_checkpoint import load_drafter
from specbench.training.drafter_config import DrafterConfig
from specbench.training.drafter_initial import (
    choose_draft_vocab,
    new_drafter,
    resize_draft_vocab,
)
from specbench.training.drafter_model import DSparkDrafter
from specbench.training.feature_store import FeatureStore
from specbench.training.target_model import TargetModel

# A quarter of the embedded target's vocabulary covers 93% (chat) and 96% (code edits) of its
# own response tokens; the output layer is the larger part of drafting's cost.
DEFAULT_DRAFT_VOCAB_SIZE = 12_288
# A reserved token of the embedded target that its tokenizer never makes from text.
EMBEDDED_MASK_TOKEN_ID = 16


@dataclass(frozen=True)
class NewDrafter:
    """Shape of a drafter that does not exist yet; see :class:`DrafterConfig`.

    ``draft_vocab_size`` None takes DEFAULT_DRAFT_VOCAB_SIZE tokens, ``mask_token_id`` None
    the one of :func:`default_mask_token_id`.
    """

    num_layers: int = 2
    block_size: int = 7
    markov_rank: int = 64
    draft_vocab_size: int | None = None
    mask_token_id: int | None = None


def starting_drafter(
    target: TargetModel,
    store: FeatureStore,
    shape: NewDrafter,
    start_from: Path | None,
    seed: int,
    ids: torch.Tensor | None,
) -> DSparkDrafter:
    """The drafter before its first step.

    Args:
        shape: of a new drafter; of one that is started from, only ``draft_vocab_size``
            counts, where given.
        start_from: checkpoint folder; None makes a new drafter.
        seed: of new weights.
        ids: [draft_vocab_size] vocabulary of a run that is taken up; None chooses one.

    Raises:
        InputError: the checkpoint is damaged or another target's.
        UsageError: it reads other layers than the features hold; or as :func:`make_drafter`.
    """
    if start_from is None:
        return make_drafter(target, store, shape, seed, ids)
    drafter = load_drafter(start_from, target.embedding)
    if drafter.config.target_layer_ids != store.target_layer_ids:
        raise UsageError(
            f"{start_from} reads target layers {list(drafter.config.target_layer_ids)}, the "
            f"features hold {list(store.target_layer_ids)}; extract those with --layer"
        )
    if shape.draft_vocab_size in (None, drafter.config.draft_vocab_size):
        return drafter
    size = min(shape.draft_vocab_size or target.vocab_size, target.vocab_size)
    if ids is None or len(ids) != size:
        ids = choose_draft_vocab(token_counts(store, target.vocab_size), size)
    return resize_draft_vocab(drafter, ids, target.lm_head_weight)


def make_drafter(
    target: TargetModel,
    store: FeatureStore,
    shape: NewDrafter,
    seed: int,
    draft_token_ids: torch.Tensor | None = None,
) -> DSparkDrafter:
    """A new drafter whose vocabulary is what the training responses use most.

    Args:
        shape: with a mask token.
        seed: of the weights.
        draft_token_ids: [draft_vocab_size] vocabulary to use instead, if it has the size.

    Raises:
        UsageError: no mask token, or one that occurs in the responses.
    """
    if shape.mask_token_id is None:
        raise UsageError("a new drafter needs --mask-token-id: a token that never occurs in text")
    config = DrafterConfig.from_target(
        target.config.to_dict(),
        num_layers=shape.num_layers,
        block_size=shape.block_size,
        markov_rank=shape.markov_rank,
        draft_vocab_size=min(shape.draft_vocab_size or DEFAULT_DRAFT_VOCAB_SIZE, target.vocab_size),
        mask_token_id=shape.mask_token_id,
        target_layer_ids=store.target_layer_ids,
    )
    counts = token_counts(store, target.vocab_size)
    if counts[shape.mask_token_id] > 0:
        raise UsageError(
            f"--mask-token-id {shape.mask_token_id}: the responses contain this token "
            f"{int(counts[shape.mask_token_id]):,} times; name one that never occurs in text"
        )
    ids = draft_token_ids
    if ids is None or len(ids) != config.draft_vocab_size:
        ids = choose_draft_vocab(counts, config.draft_vocab_size)
    return new_drafter(config, target.embedding, target.lm_head_weight, ids, seed)


def default_mask_token_id(model: str | None, vocab_size: int) -> int:
    """A token that never occurs in text: of another target the last row of the embedding,
    where that is padding beyond the tokenizer's own tokens.

    Raises:
        UsageError: the tokenizer uses every row.
    """
    reference = resolve_model(model)
    if reference.is_default:
        return EMBEDDED_MASK_TOKEN_ID
    # Deferred: importing transformers takes seconds.
    from transformers import AutoTokenizer

    num_tokens = len(AutoTokenizer.from_pretrained(reference.path_or_id))
    if num_tokens < vocab_size:
        return vocab_size - 1
    raise UsageError(
        f"all {vocab_size:,} tokens of {reference.path_or_id} are in use; name one that never "
        "occurs in text, such as a reserved one, with --mask-token-id"
    )


def token_counts(store: FeatureStore, vocab_size: int) -> torch.Tensor:
    """How often each token occurs in the stored responses, [vocab_size] int64."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for shard in store.shards:
        starts, ends = shard.response_starts, shard.sequence_starts[1:]
        steps = torch.zeros(shard.num_tokens + 1, dtype=torch.int64)
        steps[starts] += 1
        steps[ends] -= 1
        in_response = steps.cumsum(0)[:-1] > 0
        counts += torch.bincount(shard.token_ids[in_response].long(), minlength=vocab_size)
    return counts
