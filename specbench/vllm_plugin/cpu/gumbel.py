"""CPU twins of the kernels that draw tokens: Gumbel-max sampling and trace replay.

Conventions as in ``specbench.vllm_plugin.cpu.batch``; the number of rows is read from a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from specbench.kernels.cpu import sampling
from specbench.kernels.cpu.random import DRAFT_NOISE_SALT
from specbench.kernels.cpu.rows import flat_view, readable

_SAMPLE = "vllm.v1.worker.gpu.sample."


def gumbel_sample(
    local_argmax_ptr: Tensor,
    local_max_ptr: Tensor,
    logits_cache_ptr: Tensor | None,
    logits_cache_col_ptr: Tensor | None,
    logits_cache_source_ptr: Tensor | None,
    logits_ptr: Tensor,
    expanded_idx_mapping_ptr: Tensor,
    seeds_ptr: Tensor,
    pos_ptr: Tensor,
    temp_ptr: Tensor,
    vocab_size: int,
    IS_DRAFTING: bool,
    APPLY_TEMPERATURE: bool,
    USE_FP64: bool,
) -> None:
    """Draw a token for each row, and copy the rows into the cache of draft logits if given."""
    idx_mapping = expanded_idx_mapping_ptr.numpy()
    if logits_cache_ptr is not None:
        assert logits_cache_source_ptr is not None
        assert logits_cache_col_ptr is not None
        kept, (req_stride, column_stride) = flat_view(logits_cache_ptr)
        source, (source_stride,) = flat_view(logits_cache_source_ptr)
        columns = logits_cache_col_ptr.reshape(-1).numpy()
        sampling.keep_rows(
            kept,
            req_stride,
            column_stride,
            columns,
            source,
            source_stride,
            vocab_size,
            idx_mapping,
        )
    flat, (stride,) = flat_view(readable(logits_ptr))
    sampling.sample_rows(
        local_argmax_ptr.numpy(),
        local_max_ptr.numpy(),
        flat,
        stride,
        vocab_size,
        idx_mapping,
        temp_ptr.numpy(),
        seeds_ptr.numpy(),
        pos_ptr.numpy(),
        DRAFT_NOISE_SALT if IS_DRAFTING else 0,
        APPLY_TEMPERATURE,
        USE_FP64,
    )


def trace_replay(
    sampled_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    trace_token_ids_ptr: Tensor,
    trace_len_ptr: Tensor,
    total_len_ptr: Tensor,
    prompt_len_ptr: Tensor,
) -> None:
    """Replace sampled tokens by the request's recorded ones."""
    sampling.replay_tokens(
        sampled_ptr.numpy(),
        idx_mapping_ptr.numpy(),
        trace_token_ids_ptr.numpy(),
        trace_len_ptr.numpy(),
        total_len_ptr.numpy(),
        prompt_len_ptr.numpy(),
    )


OVERRIDES: dict[str, Callable[..., Any]] = {
    _SAMPLE + "gumbel._gumbel_sample_kernel": gumbel_sample,
    _SAMPLE + "trace_replay._trace_replay_kernel": trace_replay,
}
