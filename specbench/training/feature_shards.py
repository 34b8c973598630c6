"""The files that hold extracted features: shards of tensors and the index that lists them.

Format 1. A split's shards are ``<split>-<5 digits>.safetensors``. Sequences (prompt, then
response) lie one after the other, T tokens and S sequences in all:

==================  ===================  =====================================================
tensor              shape and type       meaning
==================  ===================  =====================================================
token_ids           [T] int32            prompt and response tokens
sequence_starts     [S + 1] int64        where each sequence begins; the last entry is T
response_starts     [S] int64            where each response begins, as an index into [T]
temperatures        [S] float32          sampling temperature of the response
sources             [S] int32            index into the metadata's list of source names
aux_hidden          [T, F] bfloat16      outputs of the chosen target layers side by side
final_hidden        [T, H] bfloat16      what the target's lm_head reads
logsumexp           [T] float32          of row p's logits (which predict token p + 1),
                                         temperature 1, all of the vocabulary; 0 in prompts
argmax              [T] int32            largest of row p's logits; -1 in prompts
==================  ===================  =====================================================

"In prompts" means before the last prompt token: that row predicts the first response token
and is filled. ``<split>-index.parquet`` has one row a stored sequence. It is written after
the shard it mentions, so a shard counts once the index names it; one left behind by a
process that died in between is overwritten by the next run.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specbench.errors import EnvironmentProblem, InputError

FORMAT_VERSION = 1
TENSOR_NAMES = (
    "token_ids",
    "sequence_starts",
    "response_starts",
    "temperatures",
    "sources",
    "aux_hidden",
    "final_hidden",
    "logsumexp",
    "argmax",
)
INDEX_SCHEMA = {
    "prompt_id": pl.String,
    "source": pl.String,
    "temperature": pl.Float64,
    "digest": pl.String,  # of the tokens: two samples of one prompt differ in nothing else
    "repeat": pl.Int32,  # counts equal samples of one prompt at one temperature
    "shard": pl.Int32,
    "position": pl.Int32,  # of the sequence in its shard
    "num_tokens": pl.Int32,
    "num_response_tokens": pl.Int32,
}


@dataclass(frozen=True)
class ShardMetadata:
    """What a shard says of itself.

    Attributes:
        target_fingerprint: which target the features come from.
        target_layer_ids: the layers behind ``aux_hidden``, in order.
        sources: names that the tensor ``sources`` points into.
    """

    target_fingerprint: str
    target_layer_ids: tuple[int, ...]
    sources: tuple[str, ...]

    def to_strings(self) -> dict[str, str]:
        """As safetensors keeps metadata."""
        return {
            "format_version": str(FORMAT_VERSION),
            "target_fingerprint": self.target_fingerprint,
            "target_layer_ids": json.dumps(self.target_layer_ids),
            "sources": json.dumps(self.sources),
        }

    @classmethod
    def from_strings(cls, strings: dict[str, str] | None, path: Path) -> ShardMetadata:
        """Read back; ``path`` is named in errors.

        Raises:
            InputError: not a feature shard, or one in another format.
        """
        strings = strings or {}
        version = strings.get("format_version")
        if version is not None and version != str(FORMAT_VERSION):
            raise InputError(
                f"{path}: feature format {version}, this release reads {FORMAT_VERSION}; "
                "extract the features again"
            )
        try:
            return cls(
                strings["target_fingerprint"],
                tuple(int(layer) for layer in json.loads(strings["target_layer_ids"])),
                tuple(str(source) for source in json.loads(strings["sources"])),
            )
        except (KeyError, ValueError, TypeError):
            raise _unreadable(path, "its metadata is missing or malformed") from None


class FeatureShard:
    """One shard, mapped into memory: a tensor's pages are read when they are first touched.

    Attributes:
        path: the file.
        metadata: what it says of itself.
        token_ids, sequence_starts, response_starts, temperatures, sources, aux_hidden,
            final_hidden, logsumexp, argmax: see the top of this module. They share the
            mapping, so they must not be written to.
    """

    def __init__(self, path: Path) -> None:
        """Map ``path``.

        Raises:
            InputError: missing, not a feature shard, in another format or inconsistent.
        """
        self.path = path
        tensors: dict[str, Tensor] = {}
        try:
            with safe_open(path, framework="pt") as file:
                self.metadata = ShardMetadata.from_strings(file.metadata(), path)
                tensors = {name: file.get_tensor(name) for name in TENSOR_NAMES}
        except (OSError, SafetensorError) as problem:
            raise _unreadable(path, str(problem)) from problem
        self.token_ids = tensors["token_ids"]
        self.sequence_starts = tensors["sequence_starts"]
        self.response_starts = tensors["response_starts"]
        self.temperatures = tensors["temperatures"]
        self.sources = tensors["sources"]
        self.aux_hidden = tensors["aux_hidden"]
        self.final_hidden = tensors["final_hidden"]
        self.logsumexp = tensors["logsumexp"]
        self.argmax = tensors["argmax"]
        self._check_sizes()

    @property
    def num_sequences(self) -> int:
        """Sequences in this shard."""
        return self.response_starts.shape[0]

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens in this shard."""
        return self.token_ids.shape[0]

    def _check_sizes(self) -> None:
        per_token = (self.aux_hidden, self.final_hidden, self.logsumexp, self.argmax)
        per_sequence = (self.temperatures, self.sources)
        consistent = (
            all(tensor.shape[0] == self.num_tokens for tensor in per_token)
            and all(tensor.shape[0] == self.num_sequences for tensor in per_sequence)
            and self.sequence_starts.shape[0] == self.num_sequences + 1
            and int(self.sequence_starts[-1]) == self.num_tokens
        )
        if not consistent:
            raise _unreadable(self.path, "its tensors' sizes contradict each other")


def shard_path(folder: Path, split: str, number: int) -> Path:
    """File of a split's shard ``number``."""
    return folder / f"{split}-{number:05d}.safetensors"


def index_path(folder: Path, split: str) -> Path:
    """File that lists a split's stored sequences."""
    return folder / f"{split}-index.parquet"


def indexed_splits(folder: Path) -> list[str]:
    """Splits that have at least one finished shard."""
    ending = index_path(folder, "").name
    return sorted(path.name.removesuffix(ending) for path in folder.glob(f"*{ending}"))


def partial_prefix(split: str) -> str:
    """How the names of a split's unfinished files begin."""
    return f".{split}-partial-"


def write_shard(
    path: Path, split: str, tensors: dict[str, Tensor], metadata: ShardMetadata
) -> None:
    """Write a shard in one step: whoever looks sees the whole file or none.

    Raises:
        EnvironmentProblem: the folder cannot be written or the disk is full.
    """
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    _replace(path, split, lambda part: save_file(contiguous, part, metadata.to_strings()))


def read_index(folder: Path, split: str) -> pl.DataFrame:
    """Stored sequences of a split, columns as :data:`INDEX_SCHEMA`; no rows without an index.

    Raises:
        InputError: the index cannot be read or has other columns.
    """
    path = index_path(folder, split)
    if not path.exists():
        return pl.DataFrame(schema=INDEX_SCHEMA)
    try:
        # Read as bytes: a polars error about a damaged file may span lines and name no file.
        return pl.read_parquet(path.read_bytes()).select(
            pl.col(name).cast(kind) for name, kind in INDEX_SCHEMA.items()
        )
    except (OSError, pl.exceptions.PolarsError) as problem:
        raise _unreadable(path, str(problem)) from problem


def write_index(folder: Path, split: str, index: pl.DataFrame) -> None:
    """Replace a split's index in one step.

    Raises:
        EnvironmentProblem: the folder cannot be written or the disk is full.
    """
    _replace(index_path(folder, split), split, index.write_parquet)


def _replace(path: Path, split: str, write: Callable[[str], object]) -> None:
    """Let ``write`` fill a file beside ``path``, then put it in place."""
    part: Path | None = None
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=partial_prefix(split))
        part = Path(name)
        # The descriptor is kept open to flush through it: writers open the name themselves.
        with os.fdopen(descriptor, "rb") as handle:
            write(name)
            os.fsync(handle.fileno())
        os.chmod(part, 0o644)  # temporary files are for their owner alone
        os.replace(part, path)
    except (OSError, SafetensorError, pl.exceptions.PolarsError) as problem:
        reason = str(problem).splitlines()[0]
        raise EnvironmentProblem(
            f"cannot write {path}: {reason}; choose another folder"
        ) from problem
    finally:
        if part is not None:
            part.unlink(missing_ok=True)


def _unreadable(path: Path, reason: str) -> InputError:
    first_line = (reason.strip().splitlines() or ["unknown reason"])[0]
    return InputError(
        f"{path}: unusable features ({first_line}); delete the files of this split "
        "and extract the features again"
    )


def empty_tensors(
    num_tokens: int, num_sequences: int, num_features: int, hidden_size: int
) -> dict[str, Tensor]:
    """Tensors of a shard to be filled in; ``logsumexp`` 0 and ``argmax`` -1 throughout."""
    return {
        "token_ids": torch.empty(num_tokens, dtype=torch.int32),
        "sequence_starts": torch.zeros(num_sequences + 1, dtype=torch.int64),
        "response_starts": torch.empty(num_sequences, dtype=torch.int64),
        "temperatures": torch.empty(num_sequences, dtype=torch.float32),
        "sources": torch.empty(num_sequences, dtype=torch.int32),
        "aux_hidden": torch.empty(num_tokens, num_features, dtype=torch.bfloat16),
        "final_hidden": torch.empty(num_tokens, hidden_size, dtype=torch.bfloat16),
        "logsumexp": torch.zeros(num_tokens, dtype=torch.float32),
        "argmax": torch.full((num_tokens,), -1, dtype=torch.int32),
    }


def bytes_per_token(num_features: int, hidden_size: int) -> int:
    """Size of one token in a shard: bfloat16 hidden states and three 4-byte numbers."""
    return 2 * (num_features + hidden_size) + 3 * 4
