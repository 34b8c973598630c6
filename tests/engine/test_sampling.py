"""Every sampling parameter that users send works under speculation, or is refused up front.

The yardstick is vLLM's V1 runner without speculation, which shares none of the code under
test: at temperature 0 each parameter must give its tokens exactly.
"""

from __future__ import annotations

import asyncio
import json

import pytest
from engine_harness import steep_costs
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from specbench.records import Message

pytestmark = pytest.mark.engine

QUESTIONS = (
    "Repeat this text twice: the quick brown fox jumps over the lazy dog and the quick cat.",
    "Name two colours and say why you like them. Name two more colours.",
    "Write a short greeting.",
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
GREEDY_CASES = {
    "plain": {},
    "presence_penalty": {"presence_penalty": 1.2},
    "frequency_penalty": {"frequency_penalty": 0.8},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "logit_bias": {"logit_bias": {28: 4.0, 260: -6.0, 1: 2.0}},
    "allowed_token_ids": {"allowed_token_ids": list(range(200, 1200))},
    "bad_words": {"bad_words": ["the", "quick", "colour"]},
    "min_tokens": {"min_tokens": 18},
    "stop_token_ids": {"stop_token_ids": [30]},
    "stop": {"stop": ["dog"], "detokenize": True},
    "json_schema": {"structured_outputs": StructuredOutputsParams(json=SCHEMA)},
    "regex": {"structured_outputs": StructuredOutputsParams(regex=r"[a-z]{3,9} [0-9]{2,4}")},
    "choice": {"structured_outputs": StructuredOutputsParams(choice=["red", "dark blue"])},
}
SAMPLED_CASES = {
    "temperature": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "all": {
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.02,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {28: 1.0},
        "logprobs": 2,
    },
}


async def outputs_of(engine, label, **parameters):
    """Final RequestOutput of every question; seeds fixed, cumulative outputs."""
    options = {"temperature": 0.0, "max_tokens": 20, "seed": 7, **parameters}
    options.setdefault("detokenize", False)

    async def one(index):
        params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **options)
        prompt = TokensPrompt(
            prompt_token_ids=engine.encode_chat([Message("user", QUESTIONS[index])])
        )
        async for output in engine._llm.generate(prompt, params, f"{label}-{index}"):
            final = output
        return final

    return await asyncio.gather(*(one(i) for i in range(len(QUESTIONS))))


def tokens(outputs):
    return [tuple(output.outputs[0].token_ids) for output in outputs]


async def all_cases(engine, label, cases, **common):
    """Tokens of every case, all cases served together."""
    outputs = await asyncio.gather(
        *(outputs_of(engine, f"{label}-{name}", **common, **case) for name, case in cases.items())
    )
    return dict(zip(cases, map(tokens, outputs), strict=True))


@pytest.fixture(scope="module")
def reference(launch):
    return launch(dtype="float32", plain="v1")


@pytest.fixture(scope="module")
def expected(loop, reference):
    return loop.run(all_cases(reference, "expected", GREEDY_CASES))


@pytest.fixture(
    scope="module", params=["greedy", pytest.param("probabilistic", marks=pytest.mark.slow)]
)
def engine(request, launch, loop):
    engine = launch(dtype="float32", draft_sample_method=request.param)
    loop.run(engine.set_costs(steep_costs()))
    return engine


def test_cases_differ_from_plain_decoding(expected):
    """Each parameter does something: otherwise equality below would prove nothing."""
    unchanged = [name for name, case in expected.items() if case == expected["plain"]]
    assert unchanged == ["plain"]


@pytest.mark.parametrize("policy", ["ar", "ngram", "dspark:7"])
def test_greedy_parameters_equal_v1(loop, expected, engine, policy):
    loop.run(engine.set_policy(policy))
    actual = loop.run(all_cases(engine, policy, GREEDY_CASES))
    assert [name for name in GREEDY_CASES if actual[name] != expected[name]] == []


@pytest.mark.parametrize("policy", ["ar", "dspark:7"])
def test_logprobs_equal_v1(loop, reference, engine, policy):
    loop.run(engine.set_policy(policy))
    parameters = {"logprobs": 3, "prompt_logprobs": 2}
    expected = loop.run(outputs_of(reference, f"lp-{policy}", **parameters))
    actual = loop.run(outputs_of(engine, f"lp-{policy}", **parameters))
    for ours, theirs in zip(actual, expected, strict=True):
        assert len(ours.outputs[0].logprobs) == len(theirs.outputs[0].logprobs)
        for a, b in zip(ours.outputs[0].logprobs, theirs.outputs[0].logprobs, strict=True):
            assert a.keys() == b.keys()
            for token in a:
                assert a[token].logprob == pytest.approx(b[token].logprob, abs=2e-3)
                assert a[token].rank == b[token].rank
        for a, b in zip(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True):
            assert a.keys() == b.keys()
            for token in a:
                assert a[token].logprob == pytest.approx(b[token].logprob, abs=2e-3)


@pytest.mark.parametrize("policy", ["ngram", pytest.param("dspark:7", marks=pytest.mark.slow)])
def test_sampled_parameters_are_reproducible(loop, engine, policy):
    loop.run(engine.set_policy(policy))
    first = loop.run(all_cases(engine, f"{policy}-1", SAMPLED_CASES, temperature=0.9))
    again = loop.run(all_cases(engine, f"{policy}-2", SAMPLED_CASES, temperature=0.9))
    other = loop.run(all_cases(engine, f"{policy}-3", SAMPLED_CASES, temperature=0.9, seed=8))
    assert [name for name in SAMPLED_CASES if first[name] != again[name]] == []
    assert [name for name in SAMPLED_CASES if first[name] == other[name]] == []


def test_json_schema_gives_json(loop, engine):
    loop.run(engine.set_policy("dspark:7"))
    outputs = loop.run(outputs_of(engine, "json", max_tokens=120, **GREEDY_CASES["json_schema"]))
    parsed = [
        json.loads(engine.decode(list(o.outputs[0].token_ids)))
        for o in outputs
        if o.outputs[0].finish_reason == "stop"
    ]
    assert parsed
    assert all(set(value) == {"name", "age"} for value in parsed)


def test_several_samples_of_one_prompt_differ(loop, engine):
    loop.run(engine.set_policy("dspark:7"))
    outputs = loop.run(outputs_of(engine, "n", n=3, temperature=1.0, seed=None))
    assert len({tuple(c.token_ids) for c in outputs[0].outputs}) > 1


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"thinking_token_budget": 5}, "reasoning"),
        ({"allowed_token_ids": list(range(1025))}, "allowed_token_ids has 1025 entries"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias has 1025 entries"),
        ({"stop_token_ids": list(range(300)), "min_tokens": 2}, "stop_token_ids has 30"),
        ({"bad_words": [f"{i} a b c d e f g h i j" for i in range(110)]}, "bad_words has"),
    ],
)
def test_unusable_parameter_is_refused_and_the_engine_lives(loop, engine, parameters, message):
    loop.run(engine.set_policy("ar"))
    with pytest.raises(VLLMValidationError, match=message):
        loop.run(outputs_of(engine, f"refused-{message}", **parameters))
    assert all(loop.run(outputs_of(engine, f"alive-{message}")))
