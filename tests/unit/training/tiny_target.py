"""A random two-layer target and responses for it, for tests of features and evaluation."""

from __future__ import annotations

import numpy as np
import polars as pl
import torch

from specbench.training.target_model import TargetModel

VOCAB = 96
LAYER_IDS = (0, 1)


def make_target(
    seed: int = 0, *, model_type: str = "llama", dtype: torch.dtype = torch.float32
) -> TargetModel:
    """Three layers of width 32; float32, so that equality is not blurred by rounding."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        model_type,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        max_position_embeddings=64,
        # Wide enough that the logits differ between tokens.
        initializer_range=0.5,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return TargetModel(model, fingerprint=f"tiny-{model_type}-{seed}")


def make_responses(num_prompts: int = 6, seed: int = 0, split: str = "train") -> pl.DataFrame:
    """One greedy and one sampled response a prompt, of different lengths; random tokens."""
    rng = np.random.default_rng(seed)
    rows = [
        {
            "prompt_id": f"p{seed}-{index}",
            "source": ("chat", "code-edit")[index % 2],
            "split": split,
            "temperature": temperature,
            "prompt_token_ids": rng.integers(VOCAB, size=rng.integers(1, 9)).tolist(),
            "response_token_ids": rng.integers(VOCAB, size=rng.integers(3, 15)).tolist(),
        }
        for index in range(num_prompts)
        for temperature in (0.0, 1.0)
    ]
    kinds = {
        "prompt_token_ids": pl.List(pl.Int32),
        "response_token_ids": pl.List(pl.Int32),
    }
    return pl.DataFrame(rows, schema_overrides=kinds)
