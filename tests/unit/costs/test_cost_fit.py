from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.costs import CostSample, CostTable, fit_cost_table
from specbench.costs.fit import isotonic
from specbench.errors import InputError

SIZES = (1, 2, 4, 8, 16, 32)


def true_verify(tokens: int) -> float:
    return 10.0 + tokens


def true_draft(drafted: int) -> float:
    return 0.5 * drafted


def samples(
    repeats: int = 4, context: float = 500.0, cold: float = 10.0, noise: float = 0.0
) -> list[CostSample]:
    """Every shape ``repeats`` times; its first run costs ``cold`` times as much."""
    rng = random.Random(0)
    made = []
    for size in SIZES:
        for repeat in range(repeats):
            factor = cold if repeat == 0 else 1.0 + noise * rng.uniform(-1, 1)
            made.append(
                CostSample(
                    context,
                    size,
                    size - 1,
                    factor * true_verify(size),
                    factor * true_draft(size - 1),
                )
            )
    return made


def fit(made: list[CostSample], **kwargs) -> CostTable:
    return fit_cost_table(made, {"model": "m"}, {"who": "test"}, **kwargs)


def test_clean_samples_are_recovered_and_cold_ones_dropped() -> None:
    (context,) = fit(samples()).contexts
    assert context.context_tokens == 500
    assert context.verify.tokens == SIZES
    assert context.verify.ms == pytest.approx([true_verify(size) for size in SIZES])
    assert context.draft.tokens == tuple(size - 1 for size in SIZES)
    assert context.draft.ms == pytest.approx([true_draft(size - 1) for size in SIZES])


def test_the_first_sample_of_every_shape_is_dropped_not_of_every_size() -> None:
    warm = samples()
    # The same pass size with another number of drafted tokens is cold again.
    other_shape = [CostSample(500, 32, 99, ms, 60.0) for ms in (900.0, 42.0)]
    (context,) = fit(warm + other_shape).contexts
    assert context.verify.ms[-1] == pytest.approx(42.0)
    assert context.draft.tokens[-1] == 99


def test_one_high_outlier_does_not_lift_everything_after_it() -> None:
    made = samples(repeats=6)
    disturbed = [
        CostSample(s.context_tokens, s.num_tokens, s.num_drafted_tokens, 30.0, s.draft_ms)
        if s.num_tokens == 2
        else s
        for s in made
    ]
    (context,) = fit(disturbed).contexts
    # A running maximum would price 2, 4, 8 and 16 tokens at 30 ms.
    assert context.verify.ms[1:4] == pytest.approx([(30.0 + 14.0 + 18.0) / 3] * 3)
    assert context.verify.ms[4:] == pytest.approx([true_verify(16), true_verify(32)])


def test_medians_weigh_by_count() -> None:
    assert isotonic([2.0, 1.0], [3.0, 1.0]) == pytest.approx([1.75, 1.75])
    assert isotonic([1.0, 2.0, 3.0], [1, 1, 1]).tolist() == [1.0, 2.0, 3.0]


@settings(deadline=None)  # machine load must not fail a test
@given(
    st.lists(
        st.tuples(st.floats(0, 1e4), st.integers(1, 20)),
        min_size=1,
        max_size=12,
    )
)
def test_isotonic_is_the_weighted_least_squares_fit(points: list[tuple[float, int]]) -> None:
    values, weights = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    # Closed form of the isotonic fit: max over starts of min over ends of weighted means.
    n = len(values)
    expected = [
        max(
            min(
                np.average(values[start : end + 1], weights=weights[start : end + 1])
                for end in range(i, n)
            )
            for start in range(i + 1)
        )
        for i in range(n)
    ]
    np.testing.assert_allclose(isotonic(values, weights), expected, rtol=1e-7, atol=1e-7)


def test_raw_medians_and_counts_are_kept() -> None:
    table = fit(samples(repeats=5, noise=0.3))
    assert table.provenance["who"] == "test"
    (raw,) = table.provenance["medians"]
    assert raw["verify"]["tokens"] == list(SIZES)
    assert raw["verify"]["num_samples"] == [4] * len(SIZES)
    assert len(raw["draft"]["median_ms"]) == len(SIZES)
    assert table.fingerprint == {"model": "m"}


def test_contexts_are_separated_by_gaps() -> None:
    table = fit(samples(context=250) + samples(context=260) + samples(context=1000))
    assert [context.context_tokens for context in table.contexts] == [255, 1000]


def test_nominal_contexts_hold_a_run_that_outgrows_its_bin() -> None:
    grown = samples(context=120) + samples(context=230) + samples(context=1000)
    assert len(fit(grown).contexts) == 3
    table = fit(grown, context_lengths=(1024, 128))
    assert [context.context_tokens for context in table.contexts] == [175, 1000]


def test_padding_is_kept() -> None:
    assert fit(samples(), padding=(8, 16)).padding == (8, 16)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ([], "no samples"),
        (samples(repeats=1), "at least 2 are needed"),
        ([s for s in samples() if s.num_tokens == 4], "verify curve|draft curve"),
        ([*samples(), CostSample(500, 4, 3, float("nan"), 1.0)], "sample 24"),
        ([*samples(), CostSample(500, 4, 3, -1.0, 1.0)], "not negative"),
        ([*samples(), CostSample(float("inf"), 4, 3, 1.0, 1.0)], "finite"),
    ],
)
def test_unusable_samples_are_refused(made: list[CostSample], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fit(made)


def test_a_flat_measurement_is_refused() -> None:
    flat = [CostSample(500, size, size - 1, 10.0, 0.5 * size) for size in SIZES for _ in range(3)]
    with pytest.raises(InputError, match="verify curve: flat"):
        fit(flat)
