"""Fit the n-gram table on training prompts and grade it on others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from specbench.calibration.collect import CollectedChains, collect_chains, conversations
from specbench.calibration.reliability_report import (
    ReliabilityReport,
    SourceReliability,
    source_labels,
)
from specbench.errors import InputError, UsageError
from specbench.estimators.acceptance_evaluation import (
    AcceptanceReport,
    evaluate,
    evaluate_held_out,
    select_features,
)
from specbench.estimators.ngram_acceptance import NgramAcceptance
from specbench.estimators.ngram_table import FEATURES, NgramTable, Stratification

# Fifths. On 65,000 chains of the embedded target's own answers, cross-validated by prompt, they
# have a Brier score 0.5% below a single cut at one half (survival, all positions); cuts twice
# as fine gain no more.
RECENT_EDGES = (0.2, 0.4, 0.6, 0.8)
NO_FEATURES = "none"
WHAT = "n-gram chains"


@dataclass(frozen=True)
class LookupSpec:
    """The lookup that is calibrated: suffix lengths and the longest chain, in tokens.

    Raises:
        UsageError: lengths that no lookup can have.
    """

    min_n: int = 2
    max_n: int = 16
    num_positions: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.min_n <= self.max_n:
            raise UsageError(f"--min-n {self.min_n} --max-n {self.max_n}: need 1 <= min-n <= max-n")
        if self.num_positions < 1:
            raise UsageError(f"--num-positions {self.num_positions}: need at least 1")


@dataclass(frozen=True)
class NgramFit:
    """What was fitted and how well it does.

    Attributes:
        table: for the engine.
        features: strata features in use.
        features_were_chosen: by held-out score, rather than given.
        reports: the fixed test prompts first, where there are any; then cross-validation
            over the prompts fitted on.
        num_prompts, num_response_tokens, num_chains: what was fitted on.
    """

    table: NgramTable
    features: tuple[str, ...]
    features_were_chosen: bool
    reports: tuple[ReliabilityReport, ...]
    num_prompts: int
    num_response_tokens: int
    num_chains: int


def parse_features(text: str | None) -> tuple[str, ...] | None:
    """``--features``: names separated by commas, "none", or None to let the data choose.

    Raises:
        UsageError: an unknown or repeated name.
    """
    if text is None:
        return None
    names = [] if text.strip() == NO_FEATURES else [name.strip() for name in text.split(",")]
    ordered = tuple(name for name in FEATURES if name in names)
    if sorted(ordered) != sorted(names):
        raise UsageError(
            f"--features {text!r}: give {NO_FEATURES}, or some of {', '.join(FEATURES)}, "
            "separated by commas, each once"
        )
    return Stratification(ordered).features


def fit_ngram(
    responses: pl.DataFrame,
    lookup: LookupSpec,
    *,
    features: Sequence[str] | None,
    seed: int,
) -> NgramFit:
    """Collect chains, choose features, fit, grade.

    Responses of the train split are fitted on; those of the test split, of other prompts,
    are graded. Without a train split everything is fitted on, and graded by cross-validation
    alone. With fewer than two prompts to fit on there is no cross-validation either.

    Args:
        responses: as :func:`collect_chains` takes them.
        lookup: what the engine will look up.
        features: strata features; None chooses by held-out Brier score.
        seed: of the assignment of prompts to folds.

    Raises:
        InputError: no chain to fit on, or a single prompt.
    """
    fit_rows, test_rows = _split(responses)
    fitted_on = _collect(fit_rows, lookup)
    num_prompts = len(np.unique(conversations(fit_rows)))
    if len(np.unique(_group(fitted_on))) < 2:
        raise InputError(
            f"{num_prompts} prompt(s) with n-gram matches; a calibration needs many: generate more"
        )
    estimator = NgramAcceptance(
        min_n=lookup.min_n,
        max_n=lookup.max_n,
        num_positions=lookup.num_positions,
        features=(),
        recent_edges=RECENT_EDGES,
    )
    chains = fitted_on.chains
    chosen = select_features(estimator, chains, seed=seed) if features is None else tuple(features)
    estimator.set_params(features=chosen).fit(chains)
    labels = source_labels(fitted_on.sources)
    reports = [_report(evaluate(estimator, chains, labels=labels, seed=seed))]
    if test_rows is not None:
        graded = _collect(test_rows, lookup)
        if len(graded.chains):
            held_out = evaluate_held_out(
                estimator, graded.chains, labels=source_labels(graded.sources)
            )
            reports.insert(0, _report(held_out))
    return NgramFit(
        table=estimator.table(),
        features=chosen,
        features_were_chosen=features is None,
        reports=tuple(reports),
        num_prompts=num_prompts,
        num_response_tokens=fitted_on.num_response_tokens,
        num_chains=len(chains),
    )


def _split(responses: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame | None]:
    """(responses to fit on, responses to grade or None)."""
    fit = responses.filter(pl.col("split") == "train")
    test = responses.filter(pl.col("split") == "test")
    if fit.is_empty():
        return responses, None
    return fit, test if len(test) else None


def _collect(responses: pl.DataFrame, lookup: LookupSpec) -> CollectedChains:
    return collect_chains(
        responses,
        min_n=lookup.min_n,
        max_n=lookup.max_n,
        num_positions=lookup.num_positions,
    )


def _group(collected: CollectedChains) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
    assert collected.chains.group is not None  # the collector always sets it
    return collected.chains.group


def _report(reports: dict[str, AcceptanceReport]) -> ReliabilityReport:
    first = next(iter(reports.values()))
    is_fixed = first.num_splits == 1
    return ReliabilityReport(
        what=WHAT,
        held_out="test prompts" if is_fixed else f"{first.num_splits} folds by prompt",
        before=first.baseline,
        sources={
            name: SourceReliability(report.num_chains, report.num_groups, report.survival)
            for name, report in reports.items()
        },
    )
