from __future__ import annotations

import drafter_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.training import drafter_vocabulary_loss
from specbench.training.drafter_loss import LossWeights, Teacher, drafter_loss, position_weights
from specbench.training.drafter_model import DSparkDrafter, RowTokens
from specbench.training.drafter_vocabulary_loss import (
    VocabularyTargets,
    VocabularyWeights,
    vocabulary_loss,
)

NUM_ROWS, HIDDEN, RANK, VOCAB, TARGET_VOCAB = 11, 6, 3, 9, 14
Parts = tuple[list[torch.Tensor], VocabularyTargets, torch.Tensor]


def random_parts(seed: int) -> Parts:
    """The differentiable inputs, the targets and the teacher's full logits, float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return 1.5 * torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = [normal(NUM_ROWS, HIDDEN), normal(NUM_ROWS, RANK)]
    inputs += [normal(VOCAB, HIDDEN), normal(VOCAB, RANK)]
    teacher_hidden, head = normal(NUM_ROWS, HIDDEN), normal(TARGET_VOCAB, HIDDEN)
    full = teacher_hidden @ head.T
    labels = torch.randint(-1, VOCAB, (NUM_ROWS,), generator=generator)
    labels[0] = -1
    row_weights = torch.rand(NUM_ROWS, generator=generator, dtype=torch.float64)
    row_weights[2] = 0
    targets = VocabularyTargets(
        teacher_hidden, head[:VOCAB], full.logsumexp(-1), labels, row_weights
    )
    return [tensor.requires_grad_() for tensor in inputs], targets, full


def plain_losses(
    inputs: list[torch.Tensor], targets: VocabularyTargets, full: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cross entropy, total variation and KL per row by the definitions, and q."""
    hidden, markov, head, w2 = inputs
    p = full.softmax(-1)[:, :VOCAB]
    q = (hidden @ head.T + markov @ w2.T).softmax(-1)
    known = targets.labels >= 0
    picked = q[torch.arange(NUM_ROWS), targets.labels.clamp(min=0)]
    mass = p.sum(-1)
    inside = p / mass[:, None]
    return (
        torch.where(known, -picked.log(), 0),
        1 - torch.minimum(p, q).sum(-1),
        mass * (inside * (inside / q).log()).sum(-1),
        q,
    )


@pytest.mark.parametrize(
    "weights",
    [
        VocabularyWeights(1, 0, 0),
        VocabularyWeights(0, 1, 0),
        VocabularyWeights(0, 0, 1),
        VocabularyWeights(0.1, 0.9, 0.5),
    ],
)
@pytest.mark.parametrize("chunk_rows", [1, 4, 1024])
@pytest.mark.parametrize("tile_elements", [1, 3 * VOCAB, 10_000])
def test_values_and_gradients_equal_autograd(
    weights: VocabularyWeights,
    chunk_rows: int,
    tile_elements: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafter_vocabulary_loss, "TILE_ELEMENTS_CPU", tile_elements)
    inputs, targets, full = random_parts(seed=1)
    loss, rows = vocabulary_loss(*inputs, targets, weights, chunk_rows)
    found = torch.autograd.grad(3 * loss, inputs)
    cross_entropy, variation, kl, q = plain_losses(inputs, targets, full)
    per_row = weights.cross_entropy * cross_entropy + weights.total_variation * variation
    expected = ((per_row + weights.kl * kl) * targets.row_weights).sum()
    torch.testing.assert_close(loss, expected)
    for gradient, wanted in zip(found, torch.autograd.grad(3 * expected, inputs), strict=True):
        torch.testing.assert_close(gradient, wanted)
    torch.testing.assert_close(rows.cross_entropy, cross_entropy.detach())
    torch.testing.assert_close(rows.total_variation, variation.detach())
    torch.testing.assert_close(rows.overlap, 1 - variation.detach())
    torch.testing.assert_close(rows.kl, kl.detach() if weights.kl else torch.zeros_like(kl))
    assert torch.equal(rows.draft_ids, q.argmax(-1))
    torch.testing.assert_close(rows.draft_prob, q.detach().amax(-1))
    assert not rows.overlap.requires_grad


def test_gradients_match_finite_differences() -> None:
    inputs, targets, _ = random_parts(seed=2)
    weights = VocabularyWeights(0.3, 0.6, 0.2)

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        return vocabulary_loss(*tensors, targets, weights, chunk_rows=4)[0]

    assert torch.autograd.gradcheck(loss, tuple(inputs))


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), scale=st.floats(0.1, 40))
def test_losses_stay_in_their_ranges(seed: int, scale: float) -> None:
    inputs, targets, _ = random_parts(seed)
    wide = [scale * tensor.detach().float() for tensor in inputs]
    loss, rows = vocabulary_loss(*wide, targets, VocabularyWeights(1, 1, 1))
    assert torch.isfinite(loss)
    assert bool((rows.kl > -1e-4).all())
    assert bool((rows.overlap >= 0).all())
    assert bool((rows.overlap < 1 + 1e-5).all())
    assert bool((rows.cross_entropy > -1e-5).all())


def test_a_perfect_drafter_has_no_divergence() -> None:
    """q equal to the teacher inside the draft vocabulary; only the mass outside is lost."""
    inputs, targets, full = random_parts(seed=3)
    hidden, head = targets.teacher_hidden, targets.teacher_head
    none = torch.zeros(NUM_ROWS, RANK, dtype=torch.float64)
    _, rows = vocabulary_loss(hidden, none, head, inputs[3], targets, VocabularyWeights(0, 1, 1))
    torch.testing.assert_close(rows.kl, torch.zeros_like(rows.kl), atol=1e-12, rtol=0)
    torch.testing.assert_close(rows.overlap, full.softmax(-1)[:, :VOCAB].sum(-1))


def test_bfloat16_gradients_stay_near_float32() -> None:
    inputs, targets, _ = random_parts(seed=4)
    exact = [tensor.detach().float().requires_grad_() for tensor in inputs]
    weights = VocabularyWeights(0.1, 0.9, 0.5)
    wanted = torch.autograd.grad(vocabulary_loss(*exact, targets, weights)[0], exact)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = vocabulary_loss(*exact, targets, weights)
    found = torch.autograd.grad(loss, exact)
    for gradient, expected in zip(found, wanted, strict=True):
        assert gradient.dtype == torch.float32
        error = (gradient - expected).norm() / expected.norm()
        assert 0 < error < 0.1


def small_case() -> tuple[DSparkDrafter, torch.Tensor, RowTokens, Teacher, torch.Tensor]:
    """A drafter in float64, with the target's head over the whole vocabulary."""
    drafter = reference.tiny_drafter().double()
    config = drafter.config
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(8, config.hidden_size, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, config.vocab_size, (8,), generator=generator)
    labels[:2] = drafter.draft_token_ids[:2]
    labels[7] = -1
    tokens = RowTokens(torch.arange(8), labels.clamp(min=0).roll(1), labels)
    teacher_hidden = torch.randn(8, config.hidden_size, generator=generator, dtype=torch.float64)
    head = torch.randn(
        config.vocab_size, config.hidden_size, generator=generator, dtype=torch.float64
    )
    full = teacher_hidden @ head.T
    teacher = Teacher(
        teacher_hidden, head[drafter.draft_token_ids], full.logsumexp(-1), full.argmax(-1)
    )
    return drafter, hidden.requires_grad_(), tokens, teacher, full


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_total_equals_its_definition(kind: str) -> None:
    drafter, hidden, tokens, teacher, full = small_case()
    weights = LossWeights(0.1, 0.9, 0.4, 0.7, confidence_target=kind)
    row_weights = position_weights(torch.arange(8) % 4, tokens.labels >= 0, 0.8).double()
    leaves = [hidden, *drafter.parameters()]
    loss = drafter_loss(drafter, hidden, tokens, teacher, row_weights, weights, chunk_rows=3)
    found = torch.autograd.grad(loss.total, leaves, allow_unused=True)

    q = drafter.draft_logits(hidden, tokens.previous_tokens).softmax(-1)
    p = full.softmax(-1)[:, drafter.draft_token_ids]
    draft_ids = drafter.draft_token_ids.tolist()
    overlap = torch.minimum(p, q).sum(-1)
    best = drafter.draft_token_ids[q.argmax(-1)]
    total = torch.zeros((), dtype=torch.float64)
    markov = drafter.markov_head.markov_w1.weight[tokens.previous_tokens]
    features = torch.cat([hidden, markov], dim=-1)
    confidence = drafter.confidence_head.proj(features).squeeze(-1).sigmoid()
    for row in range(8):
        label = int(tokens.labels[row])
        part = 0.9 * (1 - overlap[row])
        if label in draft_ids:
            part = part - 0.1 * q[row, draft_ids.index(label)].log()
        mass = p[row].sum()
        part = part + 0.4 * (p[row] * (p[row] / mass / q[row]).log()).sum()
        hit = (best == teacher.argmax)[row].double() if kind == "greedy" else overlap[row].detach()
        c = confidence[row]
        part = part - 0.7 * (hit * c.log() + (1 - hit) * (1 - c).log())
        total = total + part * row_weights[row] / row_weights.sum()
    torch.testing.assert_close(loss.total, total)
    for gradient, wanted in zip(
        found, torch.autograd.grad(total, leaves, allow_unused=True), strict=True
    ):
        assert (gradient is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(gradient, wanted)
    assert torch.equal(loss.rows.draft_tokens, best)
    torch.testing.assert_close(loss.rows.confidence, confidence.detach())
    parts = 0.1 * loss.cross_entropy + 0.9 * loss.total_variation + 0.4 * loss.kl
    torch.testing.assert_close(parts + 0.7 * loss.confidence, loss.total.detach())


def test_rows_without_weight_change_nothing() -> None:
    drafter, hidden, tokens, teacher, _ = small_case()
    row_weights = torch.ones(8, dtype=torch.float64)
    row_weights[5:] = 0
    loss = drafter_loss(drafter, hidden, tokens, teacher, row_weights, LossWeights())
    (gradient,) = torch.autograd.grad(loss.total, hidden)
    assert bool((gradient[:5].abs().sum(-1) > 0).all())
    assert bool((gradient[5:] == 0).all())
    kept = slice(0, 5)
    short = drafter_loss(
        drafter,
        hidden[kept],
        RowTokens(tokens.teacher_rows[kept], tokens.previous_tokens[kept], tokens.labels[kept]),
        Teacher(
            teacher.hidden[kept], teacher.draft_head, teacher.logsumexp[kept], teacher.argmax[kept]
        ),
        row_weights[kept],
        LossWeights(),
    )
    torch.testing.assert_close(short.total, loss.total)


def test_position_weights() -> None:
    positions = torch.tensor([0, 1, 2, 0])
    valid = torch.tensor([True, True, True, False])
    assert position_weights(positions, valid, 0.5).tolist() == [1.0, 0.5, 0.25, 0.0]
