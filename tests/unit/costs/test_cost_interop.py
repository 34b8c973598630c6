"""The foreign formats, priced as their own engines document them.

``trt_step_ms`` and ``sglang_step_ms`` restate the published formula
``bias + alpha(requests) + theta(tokens)`` with clamped linear interpolation.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from specbench import costs
from specbench.costs import CostTable, TableFormat, export_table, import_table
from specbench.costs.interop import detect_format
from specbench.costs.store import to_json
from specbench.errors import InputError, UsageError

TRT = {
    "token_counts": [8, 16, 64],
    "step_time_ms": [1.0, 2.0, 9.0],
    "fixed_overhead_ms": 5.0,
    "batch_sizes": [1, 4, 16],
    "batch_overhead_ms": [0.0, 1.5, 6.0],
    "_meta": {"encoding": "decomposed"},
}
SGLANG = {
    "bias_seconds": 0.006,
    "bs_probes": [1, 4, 16],
    "alpha_seconds": [0.0, 0.0015, 0.006],
    "m_probes": [8, 16, 64],
    "theta_seconds": [0.0, 0.001, 0.008],
}
SIMPLE = {
    "sample_batch_tokens": [1, 8, 64],
    "sample_steps_per_sec": [100.0, 80.0, 25.0],
    "max_batch_tokens": 64,
}


def trt_step_ms(payload: dict, tokens: float, requests: int) -> float:
    theta = np.interp(tokens, payload["token_counts"], payload["step_time_ms"])
    alpha = np.interp(requests, payload["batch_sizes"], payload["batch_overhead_ms"])
    return float(payload["fixed_overhead_ms"] + alpha + theta)


def sglang_step_ms(payload: dict, tokens: float, requests: int) -> float:
    theta = np.interp(tokens, payload["m_probes"], payload["theta_seconds"])
    alpha = np.interp(requests, payload["bs_probes"], payload["alpha_seconds"])
    return 1000.0 * float(payload["bias_seconds"] + alpha + theta)


def write(path: Path, payload: object) -> Path:
    path.write_text(json.dumps(payload))
    return path


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    return tmp_path / "foreign.json"


@pytest.fixture
def curve_file(tmp_path: Path) -> Path:
    return write(tmp_path / "curve.json", {"tokens": [0, 7, 28], "ms": [0.2, 2.0, 5.0]})


@pytest.mark.parametrize(
    ("payload", "name"),
    [(TRT, "tensorrt-llm"), (SGLANG, "sglang"), (SIMPLE, "sglang-simple")],
)
def test_formats_are_told_by_their_keys(payload: dict, name: str) -> None:
    assert detect_format(payload, "f").value == name


def test_unknown_and_ambiguous_files_are_refused() -> None:
    with pytest.raises(InputError, match=r"not a cost table known here \(keys: hello"):
        detect_format({"hello": 1}, "f")
    with pytest.raises(InputError, match="several formats"):
        detect_format({**TRT, **SIMPLE}, "f")


@pytest.mark.parametrize(("payload", "step_ms"), [(TRT, trt_step_ms), (SGLANG, sglang_step_ms)])
def test_draft_length_reproduces_the_engines_own_step_price(
    foreign: Path, payload: dict, step_ms
) -> None:
    table = import_table(write(foreign, payload), context_tokens=512, draft_length=7)
    draft_ms, verify_ms = table.dense(512, 64, 112)
    for requests in (1, 2, 4, 9, 16):
        for tokens in (8, 11, 16, 40, 64):
            ours = draft_ms[7 * requests] + verify_ms[tokens]
            assert ours == pytest.approx(step_ms(payload, tokens, requests))
    assert table.fingerprint["imported_from"] == detect_format(payload, "f").value
    assert table.provenance["original"] == payload


def test_simple_tables_become_verify_curves_with_the_given_draft(
    foreign: Path, curve_file: Path
) -> None:
    table = import_table(write(foreign, SIMPLE), draft_from=curve_file)
    (context,) = table.contexts
    assert context.verify.tokens == (1, 8, 64)
    assert context.verify.ms == pytest.approx((10.0, 12.5, 40.0))
    assert context.draft == costs.CostCurve((0, 7, 28), (0.2, 2.0, 5.0))


def test_the_draft_of_a_table_is_taken_at_the_stated_context(
    foreign: Path, table: CostTable, tmp_path: Path
) -> None:
    donor = tmp_path / "donor.json"
    costs.write_table(table, donor)
    taken = import_table(write(foreign, SIMPLE), draft_from=donor, context_tokens=1024)
    assert taken.contexts[0].draft == table.contexts[1].draft
    with pytest.raises(UsageError, match="256, 1024"):
        import_table(foreign, draft_from=donor)


def test_our_own_tables_pass_through(table: CostTable, foreign: Path) -> None:
    foreign.write_text(to_json(table))
    assert import_table(foreign) == table
    with pytest.raises(UsageError, match="own draft curve"):
        import_table(foreign, draft_length=7)


def test_batch_overhead_beside_a_draft_curve_is_refused(foreign: Path, curve_file: Path) -> None:
    with pytest.raises(InputError, match="already holds the draft pass"):
        import_table(write(foreign, TRT), draft_from=curve_file)
    zeros = {**TRT, "batch_overhead_ms": [0.0, 0.0, 0.0]}
    table = import_table(write(foreign, zeros), draft_from=curve_file)
    assert table.contexts[0].verify.ms == (6.0, 7.0, 14.0)
    with pytest.raises(InputError, match="no batch overhead"):
        import_table(foreign, draft_length=7)


def test_a_table_without_batch_axis_is_whole_steps(foreign: Path, curve_file: Path) -> None:
    bare = {"token_counts": [8, 16], "step_time_ms": [5.0, 9.0]}
    table = import_table(write(foreign, bare), draft_from=curve_file)
    assert table.contexts[0].verify.ms == (5.0, 9.0)


@pytest.mark.parametrize("options", [{}, {"draft_length": 7, "draft_from": Path("x")}])
def test_exactly_one_source_of_the_draft_curve(foreign: Path, options: dict) -> None:
    with pytest.raises(UsageError, match="exactly one of --draft-from"):
        import_table(write(foreign, TRT), **options)


def test_draft_length_must_be_positive(foreign: Path) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        import_table(write(foreign, TRT), draft_length=0)


def test_small_dips_are_smoothed_large_ones_refused(foreign: Path, curve_file: Path) -> None:
    wobbly = {**SIMPLE, "sample_steps_per_sec": [80.0, 81.0, 25.0]}
    table = import_table(write(foreign, wobbly), draft_from=curve_file)
    ms = table.contexts[0].verify.ms
    assert ms[0] == ms[1] == pytest.approx((12.5 + 1000 / 81) / 2)
    broken = {**SIMPLE, "sample_steps_per_sec": [40.0, 80.0, 25.0]}
    with pytest.raises(InputError, match=r"step times, index \d: .*measure that size again"):
        import_table(write(foreign, broken), draft_from=curve_file)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({**TRT, "SYNTHETIC": True}, "SYNTHETIC"),
        ({**TRT, "step_time_ms": [1.0, 2.0]}, "3 sizes but 2 costs"),
        ({**TRT, "step_time_ms": "x"}, "step_time_ms must be a list"),
        ({**TRT, "step_time_ms": [1.0, None, 2.0]}, r"step_time_ms\[1\]: expected a number"),
        ({**TRT, "token_counts": [8, 64, 16]}, "size 16 follows 64"),
        ({**TRT, "step_time_ms": [1.0, float("nan"), 2.0]}, "cost nan"),
        ({**TRT, "fixed_overhead_ms": "5"}, "fixed_overhead_ms: expected a number"),
        ({**TRT, "fixed_overhead_ms": 5000.0}, "flat"),
        ({**TRT, "batch_overhead_ms": [0.0, -1.0, 6.0]}, "batch overhead|negative"),
        ({**TRT, "batch_sizes": [1]}, "1 sizes but 3 costs"),
        ({**SGLANG, "alpha_seconds": []}, "draft curve: 3 sizes but 0|no batch overhead"),
        ({**SGLANG, "m_probes": [8], "theta_seconds": [0.0]}, r"1 point\(s\)"),
    ],
)
def test_unusable_foreign_tables_are_refused(foreign: Path, payload: dict, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        import_table(write(foreign, payload), draft_length=7)
    assert str(foreign) in str(caught.value)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_impossible_rates_are_refused(foreign: Path, curve_file: Path, rate: float) -> None:
    payload = {**SIMPLE, "sample_steps_per_sec": [100.0, rate, 25.0]}
    with pytest.raises(InputError, match=r"sample_steps_per_sec\[1\]"):
        import_table(write(foreign, payload), draft_from=curve_file)


def test_an_uninitialised_sglang_table_is_refused(foreign: Path, curve_file: Path) -> None:
    payload = {"sample_batch_tokens": [1], "sample_steps_per_sec": [1.0], "max_batch_tokens": 64}
    with pytest.raises(InputError, match="at least 2 are needed"):
        import_table(write(foreign, payload), draft_from=curve_file)


@pytest.mark.parametrize(
    ("target", "step_ms"),
    [(TableFormat.TENSORRT_LLM, trt_step_ms), (TableFormat.SGLANG, sglang_step_ms)],
)
@pytest.mark.parametrize("padding", ["none", (4, 8)])
def test_exported_tables_price_steps_as_ours_do(
    table: CostTable, target: TableFormat, step_ms, padding
) -> None:
    padded = CostTable(table.contexts, table.fingerprint, {}, padding)
    payload = export_table(padded, target, context_tokens=256, draft_length=7)
    draft_ms, verify_ms = padded.dense(256, 32, 28)
    for requests in (1, 2, 4):
        for tokens in (1, 3, 8, 9, 20, 32):
            expected = draft_ms[7 * requests] + verify_ms[tokens]
            assert step_ms(payload, tokens, requests) == pytest.approx(expected)


def test_sglang_terms_start_at_zero(table: CostTable) -> None:
    payload = export_table(table, TableFormat.SGLANG, context_tokens=256, draft_length=7)
    assert payload["alpha_seconds"][0] == payload["theta_seconds"][0] == 0.0
    assert payload["bias_seconds"] == pytest.approx(0.018)
    assert payload["bs_probes"] == [1, 4]


def test_export_then_import_keeps_both_curves(table: CostTable, foreign: Path) -> None:
    payload = export_table(table, TableFormat.TENSORRT_LLM, context_tokens=256, draft_length=7)
    (context,) = import_table(write(foreign, payload), draft_length=7).contexts
    assert context.verify == table.contexts[0].verify
    assert context.draft == costs.CostCurve((7, 28), (4.0, 10.0))


def test_simple_export_round_trip(table: CostTable, foreign: Path, curve_file: Path) -> None:
    payload = export_table(table, TableFormat.SGLANG_SIMPLE, context_tokens=256)
    assert payload["max_batch_tokens"] == 32
    (context,) = import_table(write(foreign, payload), draft_from=curve_file).contexts
    assert context.verify.tokens == table.contexts[0].verify.tokens
    assert context.verify.ms == pytest.approx(table.contexts[0].verify.ms)


def test_export_asks_for_what_it_needs(table: CostTable) -> None:
    with pytest.raises(UsageError, match="--context: 256, 1024"):
        export_table(table, TableFormat.SGLANG_SIMPLE)
    with pytest.raises(UsageError, match="give --draft-length"):
        export_table(table, TableFormat.SGLANG, context_tokens=256)
    with pytest.raises(UsageError, match="multiples of --draft-length 5"):
        export_table(table, TableFormat.SGLANG, context_tokens=256, draft_length=5)
    with pytest.raises(UsageError, match="no foreign format"):
        export_table(table, TableFormat.SPECBENCH, context_tokens=256, draft_length=7)
