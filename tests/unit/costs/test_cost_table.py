from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.costs import ContextCosts, CostCurve, CostTable, validate
from specbench.costs.table import MAX_TOKENS, breakpoints
from specbench.errors import InputError

GOOD = CostCurve((1, 8, 32), (14.0, 16.0, 40.0))
DRAFT = CostCurve((0, 7), (0.5, 4.0))


def one_context(verify: CostCurve = GOOD, draft: CostCurve = DRAFT, **kwargs) -> CostTable:
    return CostTable((ContextCosts(512, draft, verify),), **kwargs)


def test_measured_sizes_are_returned_as_measured(table: CostTable) -> None:
    draft_ms, verify_ms = table.dense(256, 32, 28)
    assert verify_ms[[1, 8, 32]].tolist() == [14.0, 16.0, 40.0]
    assert draft_ms[[0, 7, 28]].tolist() == [1.0, 4.0, 10.0]
    assert draft_ms.dtype == verify_ms.dtype == np.float64
    assert (len(draft_ms), len(verify_ms)) == (29, 33)


def test_linear_between_sizes_and_constant_below_the_first() -> None:
    _, verify_ms = one_context().dense(512, 32, 7)
    assert verify_ms[20] == pytest.approx(28.0)
    assert verify_ms[0] == verify_ms[1] == 14.0


def test_extrapolated_by_the_last_slope() -> None:
    draft_ms, verify_ms = one_context().dense(512, 40, 14)
    assert verify_ms[40] == pytest.approx(40.0 + 8 * (40.0 - 16.0) / 24)
    assert draft_ms[14] == pytest.approx(4.0 + 7 * 0.5)


def test_a_pooled_tail_does_not_extrapolate_as_free() -> None:
    curve = CostCurve((1, 8, 16, 24), (10.0, 20.0, 30.0, 30.0))
    _, verify_ms = one_context(verify=curve).dense(512, 32, 1)
    assert verify_ms[32] == pytest.approx(30.0 + 8 * (30.0 - 20.0) / 16)


def test_contexts_are_blended_and_clamped(table: CostTable) -> None:
    at_256, at_1024 = table.dense(256, 16, 14), table.dense(1024, 16, 14)
    halfway = table.dense(640, 16, 14)
    for low, middle, high in zip(at_256, halfway, at_1024, strict=True):
        np.testing.assert_allclose(middle, (low + high) / 2)
    np.testing.assert_array_equal(table.dense(0, 16, 14)[1], at_256[1])
    np.testing.assert_array_equal(table.dense(9999.5, 16, 14)[1], at_1024[1])


def test_graph_padding_makes_a_staircase_up_to_the_largest_graph() -> None:
    curve = CostCurve((1, 4, 8, 16, 32), (10.0, 11.0, 12.0, 30.0, 50.0))
    _, verify_ms = one_context(verify=curve, padding=(4, 8)).dense(512, 40, 1)
    assert verify_ms[:9].tolist() == [11.0] * 5 + [12.0] * 4
    # Above the largest graph nothing is blended with the graph's own cost.
    assert verify_ms[9:17].tolist() == [30.0] * 8
    assert verify_ms[24] == pytest.approx(40.0)
    assert verify_ms[40] == pytest.approx(60.0)


def test_padding_without_measurements_above_the_largest_graph_extrapolates() -> None:
    curve = CostCurve((4, 8), (10.0, 14.0))
    _, verify_ms = one_context(verify=curve, padding=(4, 8)).dense(512, 12, 1)
    assert verify_ms.tolist()[8:] == [14.0, 15.0, 16.0, 17.0, 18.0]


@pytest.mark.parametrize("size", [-1, MAX_TOKENS + 1])
def test_absurd_dense_sizes_raise(size: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        one_context().dense(512, size, 1)


costs = st.floats(0.01, 1e5)


@st.composite
def curves(draw, first: int) -> CostCurve:
    tokens = sorted(draw(st.sets(st.integers(first, 200), min_size=2, max_size=8)))
    ms = sorted(draw(st.lists(costs, min_size=len(tokens), max_size=len(tokens))))
    return CostCurve(tuple(tokens), tuple(ms))


@st.composite
def tables(draw) -> CostTable:
    lengths = sorted(draw(st.sets(st.integers(0, 5000), min_size=1, max_size=3)))
    graphs = sorted(draw(st.sets(st.integers(1, 150), max_size=5)))
    contexts = tuple(ContextCosts(n, draw(curves(0)), draw(curves(1))) for n in lengths)
    return CostTable(contexts, padding=tuple(graphs) or "none")


@settings(deadline=None)  # machine load must not fail a test
@given(tables(), st.floats(0, 6000))
def test_dense_is_monotone_and_verify_positive(table: CostTable, context: float) -> None:
    draft_ms, verify_ms = table.dense(context, 300, 250)
    assert (np.diff(draft_ms) >= 0).all()
    assert (np.diff(verify_ms) >= 0).all()
    assert (verify_ms > 0).all()
    assert np.isfinite(draft_ms).all()
    assert np.isfinite(verify_ms).all()


@settings(deadline=None)  # machine load must not fail a test
@given(curves(1), st.sets(st.integers(1, 150), max_size=5))
def test_breakpoints_reproduce_the_staircase(curve: CostCurve, graphs: set[int]) -> None:
    padding = tuple(sorted(graphs)) or "none"
    plain = breakpoints(curve, padding)
    _, padded = one_context(verify=curve, padding=padding).dense(512, plain.tokens[-1], 1)
    sizes = np.arange(plain.tokens[0], plain.tokens[-1] + 1)
    np.testing.assert_allclose(
        np.interp(sizes, plain.tokens, plain.ms), padded[sizes], rtol=1e-9, atol=1e-9
    )


def test_a_good_table_passes(table: CostTable) -> None:
    validate(table, "t.json")
    validate(one_context(padding=(1, 2, 4)), "t.json")


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("verify", "message"),
    [
        (CostCurve((1, 8), (1.0, NAN)), r"index 1 \(8 tokens\): cost nan is not a finite"),
        (CostCurve((1, 8), (1.0, INF)), "cost inf is not a finite"),
        (CostCurve((1, 8), (-1.0, 2.0)), r"index 0 .*negative"),
        (CostCurve((1, 8), (0.0, 2.0)), "cannot cost 0 ms"),
        (CostCurve((8, 1), (1.0, 2.0)), "index 1: size 1 follows 8; sort"),
        (CostCurve((8, 8), (1.0, 2.0)), "size 8 appears twice"),
        (CostCurve((1,), (1.0,)), r"1 point\(s\), at least 2"),
        (CostCurve((), ()), r"0 point\(s\)"),
        (CostCurve((1, 8), (1.0,)), "2 sizes but 1 costs"),
        (CostCurve((1, 8, 16), (1.0, 3.0, 2.0)), "index 2: 16 tokens cost 2 ms, less than the 3"),
        (CostCurve((1, 2), (10.0, 10.19)), "flat, 1 to 2 tokens"),
        (CostCurve((1, 2), (10.0, 10.2)), "flat"),
        (CostCurve((1, MAX_TOKENS + 1), (1.0, 2.0)), "outside 1..10000000"),
        (CostCurve((0, 8), (1.0, 2.0)), "size 0 is outside 1"),
        (CostCurve((1, 8), (1.0, 1e9)), "over an hour"),
    ],
)
def test_bad_verify_curves_are_refused(verify: CostCurve, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        validate(one_context(verify=verify), "t.json")
    assert str(caught.value).startswith("t.json, context 512, verify curve")
    assert "\n" not in str(caught.value)


def test_a_flat_draft_curve_is_refused_but_free_skipping_is_not() -> None:
    validate(one_context(draft=CostCurve((0, 7), (0.0, 4.0))), "t.json")
    with pytest.raises(InputError, match="draft curve: flat"):
        validate(one_context(draft=CostCurve((0, 7), (0.0, 0.0))), "t.json")


def test_sizes_that_do_not_double_may_cost_the_same() -> None:
    validate(one_context(verify=CostCurve((10, 19), (5.0, 5.0))), "t.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"contexts": ()}, "no context length"),
        ({"padding": ()}, "empty list"),
        ({"padding": (8, 4)}, "padding, index 1: size 4 follows 8"),
        ({"padding": (0, 4)}, "padding, index 0: size 0"),
    ],
)
def test_bad_tables_are_refused(table: CostTable, changes: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        validate(dataclasses.replace(table, **changes), "t.json")


def test_repeated_contexts_are_refused(table: CostTable) -> None:
    twice = dataclasses.replace(table, contexts=table.contexts[:1] * 2)
    with pytest.raises(InputError, match="context lengths, index 1: size 256 appears twice"):
        validate(twice, "t.json")
