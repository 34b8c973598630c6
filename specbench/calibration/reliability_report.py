"""How well calibrated predictions are on prompts they were not fitted on, in one shape.

The n-gram table and the drafter's temperatures both predict survival by position; both are
graded position by position, over all sources together and for each by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from specbench.estimators.acceptance_evaluation import ALL, PositionReport, Scores
from specbench.estimators.reliability_diagram import ReliabilityPanel

# Chat prompts come from two sources that differ only in who wrote the question.
_CHAT = "chat"
# In JSON; a million samples would not tell more apart.
NUM_DECIMALS = 5


@dataclass(frozen=True)
class SourceReliability:
    """Scores on one source.

    Attributes:
        num_samples: graded chains or blocks.
        num_prompts: conversations they come from.
        survival: acceptance of positions 1..j together, before and after calibration.
    """

    num_samples: int
    num_prompts: int
    survival: tuple[PositionReport, ...]


@dataclass(frozen=True)
class ReliabilityReport:
    """Scores of one set of predictions.

    Attributes:
        what: what is predicted, for titles.
        held_out: how the prompts graded were kept out of the fit.
        before: what the predictions before calibration are.
        sources: "all" first, then each source by name.
    """

    what: str
    held_out: str
    before: str
    sources: dict[str, SourceReliability]

    def to_json(self) -> dict[str, Any]:
        """Everything but the curves, which the diagram shows."""
        return {
            "held_out": self.held_out,
            "before": self.before,
            "sources": {name: _source_json(source) for name, source in self.sources.items()},
        }

    def panels(self) -> list[ReliabilityPanel]:
        """One panel a position, all sources together; positions nothing was graded at left out."""
        return [
            ReliabilityPanel(
                title=f"position {report.position}",
                before=report.before.curve,
                after=report.after.curve,
                ece_before=report.before.ece,
                ece_after=report.after.ece,
            )
            for report in self.sources[ALL].survival
            if report.weight > 0
        ]


def source_labels(sources: NDArray[Any]) -> list[str]:
    """Source of every row as it is reported: all kinds of chat prompts are "chat"."""
    return [_CHAT if name.split("-")[0] == _CHAT else str(name) for name in sources.tolist()]


def _source_json(source: SourceReliability) -> dict[str, Any]:
    """Lists by position; what has no samples is None."""
    positions = source.survival
    return {
        "num_samples": source.num_samples,
        "num_prompts": source.num_prompts,
        "survival": {
            "num_graded": [position.weight for position in positions],
            "accepted": [_rounded(position.observed_rate) for position in positions],
            "before": _scores_json([position.before for position in positions]),
            "after": _scores_json([position.after for position in positions]),
        },
    }


def _scores_json(scores: Sequence[Scores]) -> dict[str, list[float | None]]:
    return {
        "ece": [_rounded(score.ece) for score in scores],
        "ece_noise": [_rounded(score.ece_noise) for score in scores],
        "brier": [_rounded(score.brier) for score in scores],
        "auc": [_rounded(score.auc) for score in scores],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, NUM_DECIMALS)
