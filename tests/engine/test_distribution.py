"""Above temperature 0 a policy emits what plain decoding emits, in distribution.

Many requests of one prompt are sampled under both, and the tokens at each position are
compared by a two-sample chi-square test. The prompt repeats itself, so that copies are
proposed, and half of what is proposed is wrong, so that rejections are part of it.
"""

from __future__ import annotations

from collections import Counter

import pytest
from engine_harness import complete_all, rising_calibration, steep_costs
from scipy.stats import chi2_contingency

from specbench.records import Message, SamplingSpec

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# Most of the time goes into their prompts.
NUM_SAMPLES = 800
NUM_TOKENS = 6
# Tokens seen less often than this in both samples together share one cell: the usual rule
# of at least five expected counts in each of two samples.
MIN_CELL = 10
# Of 5 positions and a few policies none should come out below it by chance: about 1 in 1,000.
ALPHA = 1e-4
# At 1 this target continues a list almost surely, and a bias would hide.
TEMPERATURE = 1.6
TEXT = (
    "Continue this list in the same way. red apple, green apple, red pear, green pear, "
    "red plum, green plum, red apple, green apple, red pear, green"
)


def position_p_value(ours: list[int], theirs: list[int]) -> float:
    """Two-sample chi-square test on token counts, rare tokens pooled."""
    counts = Counter(ours), Counter(theirs)
    common = [
        token for token in counts[0] | counts[1] if counts[0][token] + counts[1][token] >= MIN_CELL
    ]
    table = [[count[token] for token in common] for count in counts]
    for row, sample in zip(table, (ours, theirs), strict=True):
        row.append(len(sample) - sum(row))
    if sum(row[-1] for row in table) == 0:
        table = [row[:-1] for row in table]
    if len(table[0]) < 2:
        return 1.0
    return float(chi2_contingency(table).pvalue)


def sample(loop, engine, policy: str, prompt: list[int], seed: int) -> list[tuple[int, ...]]:
    """Other seeds for every policy: the samples compared must not share their noise."""
    loop.run(engine.set_policy(policy))
    loop.run(engine.take_steps())
    sampling = SamplingSpec(temperature=TEMPERATURE, ignore_eos=True, seed=seed)
    prompts = [prompt] * NUM_SAMPLES
    return loop.run(complete_all(engine, policy, prompts, sampling, NUM_TOKENS), 1200)


@pytest.fixture(scope="module", params=["greedy", "probabilistic"])
def engine(request, launch, loop):
    # In bfloat16, five times as fast: its rounding moves probabilities by far less than 800
    # samples can show.
    engine = launch(max_num_seqs=16, draft_sample_method=request.param)
    loop.run(engine.set_costs(steep_costs()))
    loop.run(engine.set_calibration(rising_calibration()))
    return engine


@pytest.fixture(scope="module")
def prompt(engine):
    return engine.encode_chat([Message("user", TEXT)]) + engine.encode_text("red apple, green")


@pytest.fixture(scope="module")
def plain(loop, engine, prompt):
    return sample(loop, engine, "ar", prompt, seed=0)


@pytest.mark.parametrize("policy", ["hybrid", "forespark", "dspark:7", "ngram:16"])
def test_tokens_are_distributed_as_in_plain_decoding(loop, engine, prompt, plain, policy):
    outputs = sample(loop, engine, policy, prompt, seed=1_000_000)
    steps = loop.run(engine.take_steps())
    accepted = sum(step.num_accepted_tokens for step in steps)
    verified = sum(step.num_verified_tokens for step in steps)
    # Without acceptances and rejections the test would show nothing.
    assert accepted > 100
    assert verified - accepted > 100
    for position in range(NUM_TOKENS):
        ours = [tokens[position] for tokens in outputs]
        theirs = [tokens[position] for tokens in plain]
        assert position_p_value(ours, theirs) > ALPHA, f"position {position}"


def test_the_test_notices_a_bias(plain):
    """A sampler that turns a fifth of its tokens into its favourite one is caught."""
    by_position = [[tokens[position] for tokens in plain] for position in range(NUM_TOKENS)]
    theirs = min(by_position, key=lambda tokens: Counter(tokens).most_common(1)[0][1])
    favourite = Counter(theirs).most_common(1)[0][0]
    biased = [favourite if index % 5 == 0 else token for index, token in enumerate(theirs)]
    assert position_p_value(biased, theirs) < ALPHA
