"""Extract from the target what a drafter learns from, once for all epochs.

Work that is done is kept: every finished shard is final, a stopped run continues after the
last one, and responses added later only add shards.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from specbench.cache import ensure_writable
from specbench.errors import InputError, Interrupted, UsageError
from specbench.training.feature_shards import (
    INDEX_SCHEMA,
    FeatureShard,
    ShardMetadata,
    bytes_per_token,
    empty_tensors,
    indexed_splits,
    partial_prefix,
    read_index,
    shard_path,
    write_index,
    write_shard,
)
from specbench.training.target_model import TargetModel

# About 450 MB for the default target and five layers; what a stopped run loses at most.
TOKENS_PER_SHARD = 65_536
# Padded tokens in one forward pass. On a CPU the weights are read once a pass, which is a few
# percent of its time from here on, while activations still fit into a few hundred MB.
TOKENS_PER_FORWARD = 4_096
# Logits held at a time: 64 MB in float32, with some hundred rows a multiplication.
LOGITS_PER_CHUNK = 1 << 24
# An anchor needs a token to predict: one emitted token and one after it.
MIN_RESPONSE_TOKENS = 2
# Index, file headers and rounding of the file system.
SLACK_BYTES = 16 << 20

Progress = Callable[[int, int], None]
SampleKey = tuple[str, float, str, int]


@dataclass(frozen=True)
class ExtractionSummary:
    """What one call did.

    Attributes:
        num_shards, num_sequences, num_tokens: added by this call.
        num_already_stored: responses that earlier calls had extracted.
        num_too_short: responses with fewer than two tokens; never stored.
    """

    num_shards: int
    num_sequences: int
    num_tokens: int
    num_already_stored: int
    num_too_short: int


@dataclass(frozen=True)
class _Sequence:
    """A response to extract; ``token_ids`` [num_tokens] int32, the prompt first."""

    prompt_id: str
    source: str
    temperature: float
    digest: str
    repeat: int
    token_ids: npt.NDArray[np.int32]
    response_start: int

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def key(self) -> SampleKey:
        return self.prompt_id, self.temperature, self.digest, self.repeat


def extract_features(
    responses: pl.DataFrame,
    target: TargetModel,
    folder: Path,
    *,
    layer_ids: Sequence[int],
    split: str,
    tokens_per_shard: int = TOKENS_PER_SHARD,
    tokens_per_forward: int = TOKENS_PER_FORWARD,
    progress: Progress | None = None,
) -> ExtractionSummary:
    """Add the features of responses that ``folder`` does not hold yet.

    A response is known by its prompt id, temperature and tokens; equal samples of one prompt
    are told apart by their count, so the order of the rows does not matter.

    Args:
        responses: columns prompt_id, source, split, temperature, prompt_token_ids,
            response_token_ids; rows of other splits are ignored.
        target: the model that wrote the responses.
        folder: created if missing; holds features of one target and one list of layers.
        layer_ids: target layers whose outputs the drafter reads, in its order.
        split: names the shards.
        tokens_per_shard: a shard is closed before it would exceed this; a longer sequence
            gets a shard of its own.
        tokens_per_forward: padded tokens in one forward pass of the target.
        progress: called with (tokens done, tokens to do in this call).

    Raises:
        InputError: a response that the target cannot have written, or unusable old shards.
        UsageError: other layers or another target than the folder's, or the folder is in use.
        EnvironmentProblem: the folder cannot be written or has too little room.
        Interrupted: Ctrl-C; whole shards are kept.
    """
    target.check_layer_ids(layer_ids)
    ensure_writable(folder, SLACK_BYTES)
    with _only_writer(folder, split):
        _remove_partial_files(folder, split)
        _check_same_origin(folder, target, layer_ids)
        index = read_index(folder, split)
        sequences, num_too_short = _read_sequences(responses, split, target)
        stored = set(index.select("prompt_id", "temperature", "digest", "repeat").iter_rows())
        pending = [sequence for sequence in sequences if sequence.key not in stored]
        num_tokens = sum(sequence.num_tokens for sequence in pending)
        size = bytes_per_token(len(layer_ids) * target.hidden_size, target.hidden_size)
        ensure_writable(folder, num_tokens * size + SLACK_BYTES)
        extraction = _Extraction(target, tuple(layer_ids), tokens_per_forward)
        extraction.report(progress, num_tokens)
        num_shards = _write_shards(
            extraction, _group_into_shards(pending, tokens_per_shard), folder, split, index
        )
    return ExtractionSummary(
        num_shards=num_shards,
        num_sequences=len(pending),
        num_tokens=num_tokens,
        num_already_stored=len(sequences) - len(pending),
        num_too_short=num_too_short,
    )


def _write_shards(
    extraction: _Extraction,
    groups: Sequence[list[_Sequence]],
    folder: Path,
    split: str,
    index: pl.DataFrame,
) -> int:
    """Extract and store each group as a shard; number of shards written."""
    first = index["shard"].n_unique()
    for number, group in enumerate(groups, start=first):
        try:
            tensors, metadata = extraction.extract(group)
            write_shard(shard_path(folder, split, number), split, tensors, metadata)
            index = pl.concat([index, _index_rows(group, number)])
            write_index(folder, split, index)
        except KeyboardInterrupt:
            raise Interrupted(
                f"stopped after {number - first} of {len(groups)} shards, which are kept; "
                "run the command again to continue"
            ) from None
    return len(groups)


class _Extraction:
    """Runs the target over groups of sequences."""

    def __init__(
        self, target: TargetModel, layer_ids: tuple[int, ...], tokens_per_forward: int
    ) -> None:
        self._target = target
        self._layer_ids = layer_ids
        self._tokens_per_forward = tokens_per_forward
        self._progress: Progress | None = None
        self._num_done = 0
        self._num_to_do = 0

    def report(self, progress: Progress | None, num_to_do: int) -> None:
        """Tell ``progress`` after each forward pass."""
        self._progress, self._num_to_do = progress, num_to_do

    def extract(self, group: list[_Sequence]) -> tuple[dict[str, Tensor], ShardMetadata]:
        """Tensors and metadata of one shard, its sequences in the order given."""
        hidden_size = self._target.hidden_size
        num_features = len(self._layer_ids) * hidden_size
        num_tokens = sum(sequence.num_tokens for sequence in group)
        tensors = empty_tensors(num_tokens, len(group), num_features, hidden_size)
        sources = tuple(sorted({sequence.source for sequence in group}))
        _fill_sequence_tensors(tensors, group, sources)
        for members in _similar_lengths(group, self._tokens_per_forward):
            self._fill_hidden(tensors, group, members)
        self._fill_logit_statistics(tensors, group)
        return tensors, ShardMetadata(self._target.fingerprint, self._layer_ids, sources)

    def _fill_hidden(
        self, tensors: dict[str, Tensor], group: list[_Sequence], members: list[int]
    ) -> None:
        """One forward pass over some sequences of a group, padded on the right."""
        longest = max(group[member].num_tokens for member in members)
        token_ids = torch.zeros(len(members), longest, dtype=torch.int64)
        for row, member in enumerate(members):
            tokens = torch.from_numpy(group[member].token_ids)
            token_ids[row, : len(tokens)] = tokens
        hidden = self._target.forward(token_ids, self._layer_ids)
        for row, member in enumerate(members):
            start, end = tensors["sequence_starts"][member : member + 2].tolist()
            tensors["aux_hidden"][start:end] = hidden.aux_hidden[row, : end - start]
            tensors["final_hidden"][start:end] = hidden.final_hidden[row, : end - start]
            self._num_done += end - start
        if self._progress is not None:
            self._progress(self._num_done, self._num_to_do)

    def _fill_logit_statistics(self, tensors: dict[str, Tensor], group: list[_Sequence]) -> None:
        """Log-sum-exp and argmax of the rows that predict a response token.

        They are computed from the stored bfloat16 hidden states, so that they fit exactly to
        the logits which training recomputes from those.
        """
        starts = tensors["sequence_starts"].tolist()
        rows = torch.cat(
            [
                torch.arange(starts[member] + sequence.response_start - 1, starts[member + 1])
                for member, sequence in enumerate(group)
            ]
        )
        rows_per_chunk = max(1, LOGITS_PER_CHUNK // self._target.vocab_size)
        for first in range(0, len(rows), rows_per_chunk):
            chunk = rows[first : first + rows_per_chunk]
            hidden = tensors["final_hidden"][chunk]
            logits = self._target.logits(hidden.to(self._target.device, self._target.dtype))
            tensors["logsumexp"][chunk] = logits.logsumexp(dim=-1).cpu()
            tensors["argmax"][chunk] = logits.argmax(dim=-1).to("cpu", torch.int32)


def _fill_sequence_tensors(
    tensors: dict[str, Tensor], group: list[_Sequence], sources: tuple[str, ...]
) -> None:
    lengths = torch.tensor([sequence.num_tokens for sequence in group])
    tensors["sequence_starts"][1:] = lengths.cumsum(0)
    starts = tensors["sequence_starts"][:-1]
    tensors["token_ids"][:] = torch.from_numpy(np.concatenate([item.token_ids for item in group]))
    tensors["response_starts"][:] = starts + torch.tensor([item.response_start for item in group])
    tensors["temperatures"][:] = torch.tensor([item.temperature for item in group])
    tensors["sources"][:] = torch.tensor([sources.index(item.source) for item in group])


def _similar_lengths(group: list[_Sequence], tokens_per_forward: int) -> Iterator[list[int]]:
    """Members of a group in batches of at most so many padded tokens, shortest first."""
    members: list[int] = []
    for member in sorted(range(len(group)), key=lambda i: group[i].num_tokens):
        if members and (len(members) + 1) * group[member].num_tokens > tokens_per_forward:
            yield members
            members = []
        members.append(member)
    if members:
        yield members


def _group_into_shards(pending: list[_Sequence], tokens_per_shard: int) -> list[list[_Sequence]]:
    """Cut the pending sequences, in order, into shards.

    Greedy from the front: what is left after some whole shards is cut as it would have been.
    """
    groups: list[list[_Sequence]] = []
    num_tokens = 0
    for sequence in pending:
        if not groups or num_tokens + sequence.num_tokens > tokens_per_shard:
            groups.append([])
            num_tokens = 0
        groups[-1].append(sequence)
        num_tokens += sequence.num_tokens
    return groups


def _read_sequences(
    responses: pl.DataFrame, split: str, target: TargetModel
) -> tuple[list[_Sequence], int]:
    """Sequences of a split in row order, and how many responses were too short."""
    sequences: list[_Sequence] = []
    seen: Counter[tuple[str, float, str]] = Counter()
    num_too_short = 0
    rows = responses.filter(pl.col("split") == split)
    columns = ("prompt_id", "source", "temperature", "prompt_token_ids", "response_token_ids")
    for prompt_id, source, temperature, prompt, response in rows.select(columns).iter_rows():
        if len(response) < MIN_RESPONSE_TOKENS:
            num_too_short += 1
            continue
        token_ids = np.asarray([*prompt, *response], dtype=np.int32)
        _check_tokens(prompt_id, token_ids, len(prompt), target)
        digest = hashlib.sha256(token_ids.tobytes() + f"/{len(prompt)}".encode()).hexdigest()
        repeat = seen[prompt_id, temperature, digest]
        seen[prompt_id, temperature, digest] += 1
        sequences.append(
            _Sequence(prompt_id, source, temperature, digest, repeat, token_ids, len(prompt))
        )
    return sequences, num_too_short


def _check_tokens(
    prompt_id: str, token_ids: npt.NDArray[np.int32], num_prompt_tokens: int, target: TargetModel
) -> None:
    another = "was another target's answer meant?"
    if num_prompt_tokens == 0:
        raise InputError(f"response to {prompt_id!r}: it has no prompt tokens; generate it again")
    if int(token_ids.min()) < 0 or int(token_ids.max()) >= target.vocab_size:
        raise InputError(
            f"response to {prompt_id!r}: token ids outside the target's vocabulary of "
            f"{target.vocab_size}; {another}"
        )
    if len(token_ids) > target.max_tokens:
        raise InputError(
            f"response to {prompt_id!r}: {len(token_ids)} tokens exceed the target's context of "
            f"{target.max_tokens}; {another}"
        )


def _index_rows(group: list[_Sequence], shard: int) -> pl.DataFrame:
    rows = [
        {
            "prompt_id": item.prompt_id,
            "source": item.source,
            "temperature": item.temperature,
            "digest": item.digest,
            "repeat": item.repeat,
            "shard": shard,
            "position": position,
            "num_tokens": item.num_tokens,
            "num_response_tokens": item.num_tokens - item.response_start,
        }
        for position, item in enumerate(group)
    ]
    return pl.DataFrame(rows, schema=INDEX_SCHEMA)


@contextmanager
def _only_writer(folder: Path, split: str) -> Iterator[None]:
    try:
        with FileLock(folder / f".{split}.lock", timeout=0):
            yield
    except Timeout:
        raise UsageError(
            f"{folder}: another process is extracting {split} features here; wait for it to end "
            "or choose another folder"
        ) from None


def _remove_partial_files(folder: Path, split: str) -> None:
    """Drop what a killed process left behind; safe under the lock."""
    for path in folder.glob(f"{partial_prefix(split)}*"):
        path.unlink(missing_ok=True)


def _check_same_origin(folder: Path, target: TargetModel, layer_ids: Sequence[int]) -> None:
    """Features of two targets or two layer lists must not meet in a folder."""
    for split in indexed_splits(folder):
        found = FeatureShard(shard_path(folder, split, 0)).metadata
        if found.target_fingerprint != target.fingerprint:
            raise UsageError(
                f"{folder} holds features of another target "
                f"({found.target_fingerprint[:12]}, not {target.fingerprint[:12]}); "
                "choose another folder"
            )
        if found.target_layer_ids != tuple(layer_ids):
            raise UsageError(
                f"{folder} holds features of target layers {list(found.target_layer_ids)}, "
                f"not {list(layer_ids)}; choose another folder"
            )
