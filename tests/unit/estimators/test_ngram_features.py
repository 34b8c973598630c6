from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specbench.errors import InputError
from specbench.estimators.calibrated_confidence import apply_temperatures
from specbench.estimators.ngram_acceptance import NgramAcceptance
from specbench.estimators.ngram_chains import NgramChains
from specbench.estimators.ngram_features import device_table, strata_of, survival_of
from specbench.estimators.ngram_table import FEATURES, Stratification

subsets = st.sets(st.sampled_from(FEATURES)).map(
    lambda chosen: tuple(name for name in FEATURES if name in chosen)
)
requests = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.integers(0, 4),
        st.sampled_from([float("nan"), 0.0, 0.3, 0.49, 0.5, 0.7, 1.0]),
        st.booleans(),
        st.sampled_from([0.0, 0.7, 1.0]),
    ),
    min_size=1,
    max_size=12,
)


@given(features=subsets, rows=requests, edges=st.sampled_from([(0.5,), (0.3, 0.7), ()]))
def test_the_engine_finds_the_same_stratum_as_the_fit(
    features: tuple[str, ...], rows: list, edges: tuple[float, ...]
) -> None:
    stratification = Stratification(features, edges)
    occurrences, agreeing, recent, in_prompt, temperature = map(np.array, zip(*rows, strict=True))
    agreeing = np.minimum(agreeing, occurrences)
    chains = NgramChains(
        *np.zeros((3, len(rows)), int), num_occurrences=occurrences, num_agreeing=agreeing,
        recent_acceptance=recent, in_prompt=in_prompt, temperature=temperature,
    )  # fmt: skip
    expected = stratification.index(chains)
    found = strata_of(
        stratification,
        torch.from_numpy(occurrences).int(),
        torch.from_numpy(agreeing).int(),
        recent_acceptance=torch.from_numpy(recent).float(),
        in_prompt=torch.from_numpy(in_prompt),
        temperatures=torch.from_numpy(temperature).float(),
    )
    assert found.dtype == torch.int64
    assert found.tolist() == expected.tolist()
    assert ((expected >= 0) & (expected < stratification.num_strata)).all()


def test_every_stratum_is_reachable_and_means_one_thing() -> None:
    stratification = Stratification(FEATURES)
    assert stratification.num_levels == (3, 3, 2, 2)
    rows = [
        (occurrences, agreeing, recent, in_prompt, temperature)
        for occurrences, agreeing in ((1, 1), (3, 3), (3, 2))
        for recent in (float("nan"), 0.1, 0.9)
        for in_prompt in (False, True)
        for temperature in (0.0, 1.0)
    ]
    columns = [torch.tensor(column) for column in zip(*rows, strict=True)]
    index = strata_of(
        stratification, columns[0], columns[1], recent_acceptance=columns[2],
        in_prompt=columns[3], temperatures=columns[4],
    )  # fmt: skip
    assert index.tolist() == list(range(36))


def test_the_table_is_gathered_and_cut_at_the_chain(draw: Callable[..., NgramChains]) -> None:
    chains = draw(3_000, seed=0)
    fitted = NgramAcceptance(min_n=2, max_n=8, num_positions=5).fit(chains)
    table = device_table(fitted.table(), "cpu")
    strata = strata_of(
        fitted.stratification_,
        torch.from_numpy(chains.num_occurrences),
        torch.from_numpy(chains.num_agreeing),
    )
    survival = survival_of(
        table,
        strata,
        torch.from_numpy(chains.match_length).int(),
        torch.from_numpy(chains.chain_length).int(),
    )
    assert survival.dtype == torch.float32
    np.testing.assert_array_equal(survival.numpy(), fitted.predict(chains).astype(np.float32))


def test_no_match_is_worth_nothing_and_long_matches_count_as_the_longest() -> None:
    table = torch.tensor([[[0.0, 0.0], [0.5, 0.25], [0.9, 0.8]]])
    strata = torch.zeros(4, dtype=torch.int64)
    survival = survival_of(
        table, strata, torch.tensor([0, 1, 7, 2]), torch.tensor([0, 2, 2, 1], dtype=torch.int32)
    )
    expected = torch.tensor([[0.0, 0.0], [0.5, 0.25], [0.9, 0.8], [0.9, 0.0]])
    assert torch.equal(survival, expected)


def test_a_missing_feature_is_named() -> None:
    ones = torch.ones(2, dtype=torch.int32)
    for feature in FEATURES[1:]:
        with pytest.raises(ValueError, match=f"the strata use '{feature}'"):
            strata_of(Stratification((feature,)), ones, ones)


@pytest.mark.parametrize(
    ("features", "edges", "message"),
    [
        (("agreement", "agreement"), (0.5,), "each at most once"),
        ((), (0.0,), "recent_edges"),
        ((), (0.7, 0.3), "recent_edges"),
        ((), (float("nan"),), "recent_edges"),
        (("recent_acceptance",), tuple(np.linspace(0.01, 1, 5_000)), "strata; at most"),
    ],
)
def test_impossible_strata_are_refused(features: tuple, edges: tuple, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Stratification(features, edges)


# Meta tensors have shapes but no values: any read by the host raises.


def test_nothing_is_read_back_to_the_host() -> None:
    def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    strata = strata_of(
        Stratification(FEATURES), meta(5), meta(5),
        recent_acceptance=meta(5, dtype=torch.float32), in_prompt=meta(5, dtype=torch.bool),
        temperatures=meta(5, dtype=torch.float32),
    )  # fmt: skip
    survival = survival_of(meta(36, 9, 16, dtype=torch.float32), strata, meta(5), meta(5))
    assert (survival.device.type, tuple(survival.shape)) == ("meta", (5, 16))
    confidences = apply_temperatures(meta(5, 7, dtype=torch.float32), meta(7, dtype=torch.float32))
    assert (confidences.device.type, tuple(confidences.shape)) == ("meta", (5, 7))


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("ngram_features", "sklearn"),
        ("calibrated_confidence", "sklearn"),
        ("calibration_store", "sklearn"),
        ("calibration_store", "torch"),
        ("ngram_acceptance", "torch"),
        ("reliability", "sklearn"),
    ],
)
def test_the_engine_loads_no_fitting_code_and_the_fit_no_torch(module: str, forbidden: str) -> None:
    code = f"import sys, specbench.estimators.{module}; print({forbidden!r} in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "False"
