"""Two tensor-parallel ranks give the tokens of one, for plain and n-gram decoding.

The embedded target has 9 heads, which two ranks cannot share, so a small random model with
4 heads stands in; it loads, shards and decodes like any Llama.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from engine_harness import complete_all
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from specbench.engines.model_cache import default_target
from specbench.records import SamplingSpec

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small-model")
    target = default_target()
    tokenizer = AutoTokenizer.from_pretrained(target)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shutil.copy(target / "generation_config.json", folder)
    return str(folder)


def test_two_ranks_equal_one(loop, launch, small_model):
    settings = {"model": small_model, "dtype": "float32", "max_num_seqs": 4}
    engines = [launch(**settings), launch(**settings, tensor_parallel_size=2)]
    prompts = [[100 + i, 200, 300, 100 + i, 200] for i in range(4)]
    sampling = SamplingSpec(ignore_eos=True)
    for policy in ("ar", "ngram"):
        outputs = []
        for number, engine in enumerate(engines):
            loop.run(engine.set_policy(policy))
            label = f"{policy}-{number}"
            outputs.append(loop.run(complete_all(engine, label, prompts, sampling, 24)))
        assert outputs[0] == outputs[1], policy
        assert all(len(tokens) == 24 for tokens in outputs[0])
