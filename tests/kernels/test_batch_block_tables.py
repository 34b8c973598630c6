"""Twins of the block-table kernels against the Triton kernels: several groups and block sizes.

The tables are reached by address, so each case builds them inside the worker and returns copies.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from oracle import OraclePair, assert_same

MAX_REQS, MAX_TOKENS = 6, 70
HERE = "test_batch_block_tables"


def staged_tables(block_sizes: list[int], seed: int, **options: Any) -> Any:
    """Build vLLM's BlockTables and fill some rows, one of them in two steps."""
    from vllm.v1.worker.gpu.block_table import BlockTables

    rng = np.random.default_rng(seed)
    widths = [64 // size + 3 for size in block_sizes]
    tables = BlockTables(block_sizes, MAX_REQS, MAX_TOKENS, widths, torch.device("cpu"), **options)
    for step in range(2):
        for req in (4, 0, 3, 2) if step == 0 else (0, 2):
            counts = [int(rng.integers(1, 4)) for _ in block_sizes]
            ids = tuple(rng.integers(1, 90, count).tolist() for count in counts)
            tables.append_block_ids(req, ids, overwrite=step == 1 and req == 2)
        tables.apply_staged_writes()
    return tables


def gather(block_sizes: list[int], seed: int, num_padded: int) -> list[torch.Tensor]:
    tables = staged_tables(block_sizes, seed)
    for table in tables.input_block_tables:
        table.fill_(-5)
    out = tables.gather_block_tables(torch.tensor([3, 0, 4]), num_padded)
    return [*out, *(table.gpu for table in tables.block_tables)]


def slots(block_sizes: list[int], seed: int, **options: Any) -> torch.Tensor:
    tables = staged_tables(block_sizes, seed, **options)
    for table in tables.block_tables:  # every position has a block
        generator = torch.Generator().manual_seed(seed)
        table.gpu.copy_(torch.randint(1, 90, table.gpu.shape, generator=generator))
    tables.slot_mappings.fill_(-7)
    starts = torch.tensor([0, 5, 6, 8, 20, 20, 20], dtype=torch.int32)
    pos = torch.cat([torch.arange(7, 12), torch.tensor([40, 0, 1]), torch.arange(50, 62)])
    tables.compute_slot_mappings(torch.tensor([2, 0, -1, 4]), starts, pos, 24)
    return tables.slot_mappings


def overlay_embeds(dtype: torch.dtype, masked: bool) -> torch.Tensor:
    """Requests with all, some and none of their embeddings consumed, and one without any."""
    from vllm.v1.worker.gpu.model_states.prompt_embeds import PromptEmbedsState

    hidden = 37
    state = PromptEmbedsState(MAX_REQS, hidden, dtype, torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    for req, length in ((1, 4), (3, 20), (5, 6)):
        mask = torch.rand(length, generator=generator) < 0.4 if masked and req != 5 else None
        embeds = torch.randn(length, hidden, generator=generator)
        state.add_request(
            req,
            SimpleNamespace(req_id=str(req), prompt_embeds=embeds, prompt_is_token_ids=mask),
        )
    state.apply_staged_writes()
    batch = SimpleNamespace(
        num_reqs=4,
        num_scheduled_tokens=np.array([2, 19, 3, 7]),
        idx_mapping=torch.tensor([1, 3, 0, 5]),
        query_start_loc=torch.tensor([0, 2, 21, 24, 31], dtype=torch.int32),
    )
    out = torch.zeros(33, hidden, dtype=dtype)
    num_computed = torch.tensor([0, 4, 0, 3, 0, 1], dtype=torch.int32)
    state.apply(batch, num_computed, out)
    return out


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("block_sizes", [[16], [4, 16, 5]])
def test_staged_writes_and_gather(pair: OraclePair, seed: int, block_sizes: list[int]) -> None:
    for num_padded in (3, 5):
        reference, twin = pair.call(f"{HERE}:gather", block_sizes, seed, num_padded)
        assert int(reference.value[0][0, 0]) > 0  # the table of request 3
        assert_same(reference.value, twin.value)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("block_sizes", [[16], [4, 16, 5]])
def test_slot_mappings(pair: OraclePair, seed: int, block_sizes: list[int]) -> None:
    reference, twin = pair.call(f"{HERE}:slots", block_sizes, seed)
    assert_same(reference.value, twin.value)
    assert (reference.value[:, 6:8] == -1).all()  # index -1: no slot


def test_slot_mappings_of_a_disabled_group(pair: OraclePair) -> None:
    enabled = [True, False]
    reference, twin = pair.call(f"{HERE}:slots", [8, 16], 0, slot_mapping_enabled=enabled)
    assert_same(reference.value, twin.value)
    assert (twin.value[1] == -1).all()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("interleave", [1, 2])
def test_slot_mappings_under_context_parallelism(
    pair: OraclePair, rank: int, interleave: int
) -> None:
    options = {"cp_size": 2, "cp_rank": rank, "cp_interleave": interleave}
    reference, twin = pair.call(f"{HERE}:slots", [8, 4], 0, dcp_sharded=[True, False], **options)
    assert_same(reference.value, twin.value)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_staged_writes_of_every_dtype(pair: OraclePair, dtype: torch.dtype) -> None:
    reference, twin = pair.launch(
        "vllm.v1.worker.gpu.buffer_utils._apply_write_kernel",
        (3,),
        torch.zeros(5, 7, dtype=dtype),
        7,
        torch.tensor([4, 0, 4], dtype=torch.int32),
        torch.tensor([0, 6, 3], dtype=torch.int32),
        torch.arange(1, 7).to(dtype) * 3,
        torch.tensor([3, 4, 6], dtype=torch.int32),
        None,
        BLOCK_SIZE=4,
        MULTI_GROUP=False,
    )
    assert_same(reference.args[0], twin.args[0])
    assert int((twin.args[0] != 0).sum()) == 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("masked", [True, False])
def test_prompt_embeds(pair: OraclePair, dtype: torch.dtype, masked: bool) -> None:
    reference, twin = pair.call(f"{HERE}:overlay_embeds", dtype, masked)
    assert (reference.value != 0).any()
    assert_same(reference.value, twin.value)
