from __future__ import annotations

import drafter_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.training import drafter_attention
from specbench.training.drafter_model import DraftBatch, row_tokens

LENGTHS = [17, 9, 30]
# Not sorted, both ends of a sequence, two blocks on one anchor.
ANCHORS = [40, 3, 16, 18, 25, 8, 55, 41, 40, 1]
BLOCK_LENGTHS = [5, 1, 4, 5, 2, 3, 5, 1, 2, 5]


def gradients(drafter: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad
        for name, parameter in drafter.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("per_tile", [1, 2, 32])
def test_packed_pass_equals_one_block_at_a_time(
    per_tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter_attention, "BLOCKS_PER_TILE_CPU", per_tile)
    drafter = reference.tiny_drafter()
    batch = reference.tiny_batch(drafter.config, LENGTHS, ANCHORS, BLOCK_LENGTHS)
    expected = reference.naive_forward(drafter, batch)
    torch.testing.assert_close(drafter(batch).hidden, expected, rtol=1e-4, atol=1e-4)


def test_gradients_equal_those_of_one_block_at_a_time() -> None:
    drafter = reference.tiny_drafter().double()
    batch = reference.tiny_batch(drafter.config, LENGTHS, ANCHORS, BLOCK_LENGTHS)
    batch = DraftBatch(
        batch.token_ids,
        batch.aux_hidden.double(),
        batch.sequence_starts,
        batch.anchors,
        batch.block_lengths,
    )
    upstream = torch.randn(sum(BLOCK_LENGTHS), drafter.config.hidden_size, dtype=torch.float64)
    (reference.naive_forward(drafter, batch) * upstream).sum().backward()
    expected = gradients(drafter)
    drafter.zero_grad()
    (drafter(batch).hidden * upstream).sum().backward()
    found = gradients(drafter)
    assert found.keys() == expected.keys()
    assert {"fc.weight", "layers.0.self_attn.k_norm.weight"} <= found.keys()
    for name, gradient in expected.items():
        # Rotary angles are float32 in the module.
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-4, msg=name)


@settings(max_examples=25)
@given(data=st.data())
def test_a_block_does_not_depend_on_the_others(data: st.DataObject) -> None:
    drafter = reference.tiny_drafter()
    lengths = data.draw(st.lists(st.integers(2, 12), min_size=1, max_size=4))
    blocks = data.draw(
        st.lists(
            st.tuples(st.integers(0, sum(lengths) - 1), st.integers(1, 5)), min_size=1, max_size=8
        )
    )
    anchors, sizes = [a for a, _ in blocks], [d for _, d in blocks]
    batch = reference.tiny_batch(drafter.config, lengths, anchors, sizes)
    with torch.no_grad():
        together = drafter(batch)
        for index, (anchor, size) in enumerate(blocks):
            alone = DraftBatch(
                batch.token_ids,
                batch.aux_hidden,
                batch.sequence_starts,
                torch.tensor([anchor]),
                torch.tensor([size]),
            )
            rows = together.hidden[together.row_block == index]
            torch.testing.assert_close(rows, drafter(alone).hidden, rtol=1e-4, atol=1e-4)


def test_context_ends_before_the_anchor_and_before_other_sequences() -> None:
    drafter = reference.tiny_drafter()
    batch = reference.tiny_batch(drafter.config, LENGTHS, [20], [5])
    aux = batch.aux_hidden.clone().requires_grad_()
    varied = DraftBatch(
        batch.token_ids, aux, batch.sequence_starts, batch.anchors, batch.block_lengths
    )
    (gradient,) = torch.autograd.grad(drafter(varied).hidden.square().sum(), aux)
    used = gradient.abs().sum(dim=1) > 0
    assert used.nonzero().flatten().tolist() == [17, 18, 19]


def test_length_changes_what_a_block_says() -> None:
    """Attention inside a block is not causal: a shortened block is another input."""
    drafter = reference.tiny_drafter()
    batch = reference.tiny_batch(drafter.config, LENGTHS, [20, 20], [5, 2])
    out = drafter(batch)
    assert out.row_position.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert not torch.allclose(out.hidden[:2], out.hidden[5:], atol=1e-3)


def test_row_tokens() -> None:
    config = reference.tiny_config()
    batch = reference.tiny_batch(config, [6, 4], [2, 8, 5], [2, 4, 1])
    row_block, row_position = batch.rows()
    assert row_block.tolist() == [0, 0, 1, 1, 1, 1, 2]
    assert row_position.tolist() == [0, 1, 0, 1, 2, 3, 0]
    rows = row_tokens(batch, row_block, row_position)
    ids = batch.token_ids.tolist()
    assert rows.teacher_rows.tolist() == [2, 3, 8, 9, 9, 9, 5]
    assert rows.previous_tokens.tolist() == [ids[i] for i in [2, 3, 8, 9, 9, 9, 5]]
    assert rows.labels.tolist() == [ids[3], ids[4], ids[9], -1, -1, -1, -1]


def test_bfloat16_stays_near_float32() -> None:
    drafter = reference.tiny_drafter()
    batch = reference.tiny_batch(drafter.config, LENGTHS, ANCHORS, BLOCK_LENGTHS)
    exact = drafter(batch).hidden
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = drafter(batch).hidden
    assert rounded.dtype == torch.bfloat16
    # 8 bits of mantissa, a dozen roundings on the way.
    error = (rounded.float() - exact).norm() / exact.norm()
    assert 0 < error < 0.05
    rounded.float().sum().backward()
    assert drafter.layers[0].mlp.up_proj.weight.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("anchors", "sizes", "message"),
    [
        ([20], [6], "1..5"),
        ([20], [0], "1..5"),
        ([56], [1], "outside"),
        ([-1], [1], "outside"),
        ([], [], "at least one"),
        ([3], [1, 2], "one length"),
    ],
)
def test_impossible_blocks_are_refused(anchors: list[int], sizes: list[int], message: str) -> None:
    drafter = reference.tiny_drafter()
    batch = reference.tiny_batch(drafter.config, LENGTHS, anchors, sizes)
    with pytest.raises(ValueError, match=message):
        drafter(batch)


def test_embedding_is_neither_trained_nor_saved() -> None:
    drafter = reference.tiny_drafter()
    assert "embed_tokens" not in drafter.state_dict()
    assert all(parameter is not drafter.embed_tokens for parameter in drafter.parameters())
