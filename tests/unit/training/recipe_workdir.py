"""Responses and features of the tiny target in a recipe folder, and the target in its place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from tiny_target import LAYER_IDS, make_target

from specbench.training import recipe
from specbench.training.features import extract_features
from specbench.training.responses import Response, ResponseWriter
from specbench.training.starting_drafter import NewDrafter
from specbench.training.target_model import TargetModel

MASK = 95
NUM_LEARNABLE_TOKENS = 12
SHAPE = NewDrafter(
    num_layers=1, block_size=4, markov_rank=4, draft_vocab_size=32, mask_token_id=MASK
)


def learnable(num_prompts: int, seed: int, split: str) -> list[Response]:
    """Answers that count upwards round a ring of tokens: the next token is certain."""
    rng = np.random.default_rng(seed)
    responses = []
    for index in range(num_prompts):
        ring = rng.permutation(np.arange(20, 20 + NUM_LEARNABLE_TOKENS)).tolist()
        prompt = rng.integers(40, 90, size=8).tolist()
        start = int(rng.integers(5))
        responses.append(
            Response(
                f"{split}-{index}",
                ("chat", "code-edit")[index % 2],
                split,
                (0.0, 1.0)[index // 2 % 2],
                prompt,
                (ring + ring)[start : start + 20],
            )
        )
    return responses


def make_workdir(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    num_prompts: int = 16,
    target: TargetModel | None = None,
) -> TargetModel:
    """Fill ``folder`` with train and test data; the recipe then loads the tiny target."""
    target = target or make_target()
    monkeypatch.setattr(recipe, "load_target", lambda model, device: target)
    responses = learnable(num_prompts, 0, "train") + learnable(8, 1, "test")
    writer = ResponseWriter(
        folder / "responses", stream="0", model="tiny", fingerprint=target.fingerprint
    )
    writer.write(responses, num_loop_tokens=3)
    add_features(folder, target, responses)
    return target


def add_features(
    folder: Path,
    target: TargetModel,
    responses: list[Response],
    layer_ids: tuple[int, ...] = LAYER_IDS,
) -> None:
    """Extract features of these responses."""
    frame = pl.DataFrame([vars(response) for response in responses])
    for split in sorted(set(frame["split"])):
        extract_features(frame, target, folder / "features", layer_ids=layer_ids, split=split)
