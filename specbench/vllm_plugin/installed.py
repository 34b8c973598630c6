"""What was installed in the engine, laid out for its host and its device: costs, calibration."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specbench.costs import CostTable
from specbench.errors import UsageError
from specbench.estimators.calibrated_confidence import apply_temperatures
from specbench.estimators.engine_payload import EngineCalibration
from specbench.estimators.ngram_features import device_table
from specbench.estimators.ngram_table import NgramTable
from specbench.policies import StepCosts

# Cost tables are interpolated to the batch's mean context in steps of this many tokens:
# fine against the spacing of profiled contexts, coarse enough to be cached.
CONTEXT_BUCKET_TOKENS = 128


class InstalledCosts:
    """A cost table as dense curves by context, in host memory and on the device.

    Args:
        table: as profiled.
        max_num_tokens: largest target pass.
        max_drafted_tokens: most tokens that the model drafts in a step.
    """

    def __init__(
        self,
        table: CostTable,
        max_num_tokens: int,
        max_drafted_tokens: int,
        device: torch.device,
    ) -> None:
        self._table = table
        self._sizes = (max_num_tokens, max_drafted_tokens)
        self._device = device
        self._on_host: dict[int, StepCosts] = {}
        self._on_device: dict[int, StepCosts] = {}

    def on_host(self, context_tokens: float) -> StepCosts:
        """Costs at a mean context as float64 tensors in host memory."""
        bucket = round(context_tokens / CONTEXT_BUCKET_TOKENS)
        if bucket not in self._on_host:
            dense = self._table.dense(bucket * CONTEXT_BUCKET_TOKENS, *self._sizes)
            self._on_host[bucket] = StepCosts(*map(torch.from_numpy, dense))
        return self._on_host[bucket]

    def on_device(self, context_tokens: float) -> StepCosts:
        """Costs at a mean context as float32 tensors on the device."""
        bucket = round(context_tokens / CONTEXT_BUCKET_TOKENS)
        if bucket not in self._on_device:
            costs = self.on_host(context_tokens)
            self._on_device[bucket] = StepCosts(
                costs.draft_ms.to(self._device, torch.float32),
                costs.verify_ms.to(self._device, torch.float32),
            )
        return self._on_device[bucket]


@dataclass(frozen=True)
class InstalledCalibration:
    """A calibration with its tables on the device.

    Attributes:
        ngram: what n-gram chains are worth, and which suffix lengths to look up.
        ngram_survival: its table on the device, see ``ngram_features.device_table``.
        temperatures: [num_positions] of the model drafter's confidences; None leaves them raw.
    """

    ngram: NgramTable
    ngram_survival: torch.Tensor
    temperatures: torch.Tensor | None

    @classmethod
    def install(
        cls, calibration: EngineCalibration, block_tokens: int, device: torch.device
    ) -> InstalledCalibration:
        """Put it on the device.

        Raises:
            UsageError: it has temperatures for fewer positions than the drafter's block.
        """
        values = calibration.temperatures
        if values is not None and len(values) < block_tokens:
            raise UsageError(
                f"the calibration has temperatures for {len(values)} positions, the drafter "
                f"drafts {block_tokens}; run 'specbench calibrate' again"
            )
        return cls(
            calibration.ngram,
            device_table(calibration.ngram, device),
            None if values is None else torch.tensor(values, dtype=torch.float32, device=device),
        )

    def calibrated(self, confidence: torch.Tensor) -> torch.Tensor:
        """Conditional acceptance that these confidences stand for, [num_reqs, num_positions]."""
        if self.temperatures is None:
            return confidence
        return apply_temperatures(confidence, self.temperatures)
