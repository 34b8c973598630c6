"""Grade n-gram chains on stored responses, as a decode with the lookup alone would meet them.

Every response is walked from its first token on: look up the longest repeated suffix, count
how many leading tokens of its continuation the response goes on with, move on past these and
the bonus token. A proposed token is a one-hot draft x, which rejection sampling accepts with
probability p_target(x); a response that the target sampled holds x at that place with the
same probability, given what precedes. So at any temperature the counts have the distribution
that the engine would see at that temperature; at temperature 0 they are the engine's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from specbench.errors import InputError
from specbench.estimators.ngram_chains import NgramChains
from specbench.estimators.ngram_features import update_recent

if TYPE_CHECKING:
    from specbench.kernels.ngram_lookup import NgramMatches

# Responses walked in step with each other: enough that a step's fixed cost (some ten tensor
# operations) is small beside its lookups, few enough that lengths within a batch are similar.
RESPONSES_PER_BATCH = 512
# A chain needs a token to propose and one to compare it with.
MIN_RESPONSE_TOKENS = 2
# A follow-up turn's id is its parent's with this appended, and its text holds the parent's.
_FOLLOW_UP_MARK = "+"

_COLUMNS = (
    "match_length",
    "num_accepted",
    "chain_length",
    "num_occurrences",
    "num_agreeing",
    "in_prompt",
    "recent_acceptance",
)


@dataclass(frozen=True)
class CollectedChains:
    """Chains of many responses.

    Attributes:
        chains: one row a step in which the lookup found a match, by response, in decode
            order; ``group`` numbers conversations, so follow-up turns stay with their first.
        sources: [num_chains] where each chain's prompt came from.
        num_responses: responses walked; shorter ones than two tokens are left out.
        num_response_tokens: their tokens.
        num_steps: decode steps, those without a match included.
    """

    chains: NgramChains
    sources: NDArray[Any]
    num_responses: int
    num_response_tokens: int
    num_steps: int


@dataclass(frozen=True)
class _Texts:
    """Responses of a batch, padded: ``token_ids`` [R, max_len] int32, the rest [R] int64."""

    response: NDArray[np.int64]
    token_ids: torch.Tensor
    num_prompt_tokens: torch.Tensor
    num_tokens: torch.Tensor


def collect_chains(
    responses: pl.DataFrame, *, min_n: int = 2, max_n: int = 16, num_positions: int = 16
) -> CollectedChains:
    """Walk every response and grade what the lookup proposes.

    Args:
        responses: columns as :data:`specbench.training.responses.SCHEMA`.
        min_n, max_n: suffix lengths that the lookup tries.
        num_positions: longest chain, in tokens.

    Raises:
        InputError: missing or negative token ids, a bad temperature, or no response with two
            tokens.
    """
    frame = _usable(responses)
    parts: list[dict[str, NDArray[Any]]] = []
    num_steps = 0
    for texts in _batches(frame):
        for step in _walk(texts, min_n, max_n, num_positions):
            num_steps += len(step["response"])
            is_matched = step["match_length"] > 0
            parts.append({name: values[is_matched] for name, values in step.items()})
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    # Steps of a response are in order already: a stable sort by response keeps them so.
    order = np.argsort(columns["response"], kind="stable")
    response = columns["response"][order]
    chains = NgramChains(
        **{name: columns[name][order] for name in _COLUMNS},
        temperature=frame["temperature"].to_numpy()[response],
        # Numbers, not names: splitting by group compares them many times.
        group=np.unique(conversations(frame), return_inverse=True)[1][response],
    )
    return CollectedChains(
        chains=chains,
        sources=frame["source"].to_numpy()[response],
        num_responses=len(frame),
        num_response_tokens=int(frame["response_token_ids"].list.len().sum()),
        num_steps=num_steps,
    )


def conversations(responses: pl.DataFrame) -> NDArray[Any]:
    """[num_responses] prompt id of each conversation's first turn."""
    return responses["prompt_id"].str.strip_chars_end(_FOLLOW_UP_MARK).to_numpy()


def _usable(responses: pl.DataFrame) -> pl.DataFrame:
    """Responses long enough to grade; refuses rows that no engine can have written."""
    token_lists = ("prompt_token_ids", "response_token_ids")
    is_bad = pl.any_horizontal(
        *(pl.col(name).is_null() for name in responses.columns),
        *(pl.col(name).list.eval(pl.element().is_null()).list.any() for name in token_lists),
        *(pl.col(name).list.min() < 0 for name in token_lists),
        ~pl.col("temperature").is_finite(),
        pl.col("temperature") < 0,
    )
    bad = responses.filter(is_bad)
    if len(bad):
        raise InputError(
            f"response to {bad['prompt_id'][0]!r}: a value is missing, or a token id or the "
            f"temperature is out of range ({len(bad)} of {len(responses)} responses); generate "
            "them again"
        )
    frame = responses.filter(pl.col("response_token_ids").list.len() >= MIN_RESPONSE_TOKENS)
    if frame.is_empty():
        raise InputError(
            f"none of {len(responses)} responses has {MIN_RESPONSE_TOKENS} tokens; generate more"
        )
    return frame


def _batches(frame: pl.DataFrame) -> Iterator[_Texts]:
    """Responses of similar length together, so that few steps run over few requests."""
    num_prompt = frame["prompt_token_ids"].list.len().to_numpy().astype(np.int64)
    num_response = frame["response_token_ids"].list.len().to_numpy().astype(np.int64)
    texts = frame.select(
        pl.concat_list("prompt_token_ids", "response_token_ids").alias("text")
    ).to_series()
    order = np.argsort(num_response, kind="stable")
    for first in range(0, len(order), RESPONSES_PER_BATCH):
        rows = order[first : first + RESPONSES_PER_BATCH]
        lengths = num_prompt[rows] + num_response[rows]
        padded = np.zeros((len(rows), int(lengths.max())), dtype=np.int32)
        for i, row in enumerate(rows.tolist()):
            padded[i, : lengths[i]] = texts[row].to_numpy()
        yield _Texts(
            response=rows,
            token_ids=torch.from_numpy(padded),
            num_prompt_tokens=torch.from_numpy(num_prompt[rows]),
            num_tokens=torch.from_numpy(lengths),
        )


def _walk(
    texts: _Texts, min_n: int, max_n: int, num_positions: int
) -> Iterator[dict[str, NDArray[Any]]]:
    """The steps of one batch: for each, columns of the requests that still decode."""
    # Not above: it loads numba, and an engine that starts in this process before (to write the
    # text) reads every attribute of every module loaded, which fails on numba's lazy ones.
    from specbench.kernels.ngram_lookup import ngram_lookup

    # Tokens known to the lookup: the prompt and the first response token, from the prefill.
    known = texts.num_prompt_tokens + 1
    recent = torch.full((len(texts.response),), torch.nan)
    while True:
        active = torch.nonzero(known < texts.num_tokens).flatten()
        if not len(active):
            return
        matches = ngram_lookup(
            texts.token_ids,
            known[active].to(torch.int32),
            min_n=min_n,
            max_n=max_n,
            num_tokens=num_positions,
            rows=active.to(torch.int32),
        )
        chain_length, num_accepted = _grade(texts, active, known[active], matches)
        yield {
            "response": texts.response[active.numpy()],
            "match_length": matches.match_lengths.numpy(),
            "num_accepted": num_accepted.numpy(),
            "chain_length": chain_length.numpy(),
            "num_occurrences": matches.num_occurrences.numpy(),
            "num_agreeing": matches.num_agreeing.numpy(),
            "in_prompt": (matches.starts < texts.num_prompt_tokens[active]).numpy(),
            "recent_acceptance": recent[active].numpy(),
        }
        recent[active] = update_recent(recent[active], matches.counts > 0, num_accepted > 0)
        known[active] += num_accepted + 1


def _grade(
    texts: _Texts, active: torch.Tensor, known: torch.Tensor, matches: NgramMatches
) -> tuple[torch.Tensor, torch.Tensor]:
    """(chain lengths cut at the response's end, leading tokens that equal it), each [N]."""
    room = texts.num_tokens[active] - known
    chain_length = torch.minimum(matches.counts.long(), room)
    offsets = torch.arange(matches.drafts.shape[1])
    positions = (known[:, None] + offsets).clamp(max=texts.token_ids.shape[1] - 1)
    emitted = texts.token_ids[active[:, None], positions]
    is_equal = (matches.drafts == emitted) & (offsets < chain_length[:, None])
    return chain_length, is_equal.long().cumprod(dim=1).sum(dim=1)
