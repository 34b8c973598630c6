"""Train a drafter on extracted features; stop and go on at any step.

A run folder holds ``state.pt`` (weights, optimiser, place in the data), ``log.jsonl`` (one
line every few steps) and, in the end, the drafter itself under ``drafter/``.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from specbench.errors import InputError, UsageError
from specbench.training.drafter_loss import (
    DraftLoss,
    LossWeights,
    Teacher,
    drafter_loss,
    position_weights,
)
from specbench.training.drafter_model import DraftBatch, DSparkDrafter, row_tokens
from specbench.training.feature_store import BatchPlan, FeatureStore, TrainingBatch
from specbench.training.optimizer import DrafterOptimizer, OptimizerSpec
from specbench.training.training_state import (
    Place,
    append_log,
    cut_log,
    read_state,
    uninterrupted,
    write_state,
)

# A line every 20 steps is every few seconds on two cores: enough to draw a curve.
LOG_EVERY_STEPS = 20
# What a crash can lose; writing takes a second.
SAVE_EVERY_S = 300.0

OnProgress = Callable[[float, float], None]


@dataclass(frozen=True)
class TrainSpec:
    """One training run.

    Attributes:
        epochs: passes over the data; None trains by time.
        minutes: time in training steps; None trains by epochs. Exactly one is given. The
            learning rate falls along whichever counts.
        tokens_per_batch: prompt and response tokens of a step.
        anchor_probability: chance of each position to start a block, each time it is seen.
        block_length_probabilities: chance of a block to be 1, 2, ... tokens long.
        position_decay: weight of a block's position over the one before it.
        loss: weights of the losses after the start.
        kl_share: part of the training over which a KL term of weight 1 fades to nothing: it
            pulls on every token from the first step on, where the overlap is still flat.
        optimizer: how weights are moved.
        seed: of the order of the data, the anchors and the lengths.

    Raises:
        UsageError: a value out of range.
    """

    epochs: float | None = None
    minutes: float | None = None
    tokens_per_batch: int = 4096
    anchor_probability: float = 0.5
    block_length_probabilities: tuple[float, ...] = (0.05, 0.05, 0.05, 0.1, 0.1, 0.05, 0.6)
    position_decay: float = 0.8
    loss: LossWeights = field(default_factory=LossWeights)
    kl_share: float = 0.25
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.minutes is None):
            raise UsageError("give either --epochs or --minutes of training, and not both")
        length = self.epochs if self.epochs is not None else self.minutes
        if length is None or not 0 < length < math.inf:
            raise UsageError(f"the training is {length} long; give a number above 0")
        if not 0 < self.position_decay <= 1:
            raise UsageError(
                f"position decay is {self.position_decay}; give a number above 0, at most 1"
            )
        if not 0 <= self.kl_share <= 1:
            raise UsageError(f"KL share is {self.kl_share}; give a number between 0 and 1")
        # Refuses what cannot be drawn before anything is loaded.
        _ = self.plan

    @property
    def plan(self) -> BatchPlan:
        """How batches are drawn."""
        return BatchPlan(
            self.tokens_per_batch,
            self.anchor_probability,
            self.block_length_probabilities,
            self.seed,
        )

    def loss_at(self, progress: float) -> LossWeights:
        """Loss weights at a share of the training."""
        fading = max(0.0, 1.0 - progress / self.kl_share) if self.kl_share else 0.0
        return replace(self.loss, kl=self.loss.kl + fading)


class Trainer:
    """One run over one store.

    Args:
        drafter: trained in place; on the device to train on.
        store: training features.
        lm_head: [vocab_size, target_hidden_size] of the target.
        spec: the run.
        folder: of the run; an unfinished run in it is taken up. Hold
            :func:`specbench.training.training_state.only_trainer` meanwhile.

    Raises:
        UsageError: the folder holds a run of another spec.
        InputError: its state cannot be read, or is of another drafter.
    """

    def __init__(
        self,
        drafter: DSparkDrafter,
        store: FeatureStore,
        lm_head: torch.Tensor,
        spec: TrainSpec,
        folder: Path,
    ) -> None:
        block_size = drafter.config.block_size
        if len(spec.block_length_probabilities) > block_size:
            raise UsageError(
                f"block lengths up to {len(spec.block_length_probabilities)} were asked for, "
                f"the drafter's block is {block_size}"
            )
        self._drafter = drafter
        self._device = drafter.fc.weight.device
        self._store = store
        self._spec = spec
        self._folder = folder
        self._draft_head = lm_head[drafter.draft_token_ids.cpu()].to(self._device, torch.bfloat16)
        self._optimizer = DrafterOptimizer(drafter.named_parameters(), spec.optimizer)
        self._steps_of_epoch: tuple[int, int] | None = None
        self.place = Place()
        folder.mkdir(parents=True, exist_ok=True)
        self._load()

    @property
    def progress(self) -> float:
        """Share of the training that is done, 0 to 1."""
        if self._spec.minutes is not None:
            return min(1.0, self.place.trained_s / (60.0 * self._spec.minutes))
        assert self._spec.epochs is not None
        epochs = self.place.epoch + self.place.step_in_epoch / self._num_epoch_steps()
        return min(1.0, epochs / self._spec.epochs)

    def _num_epoch_steps(self) -> int:
        """Steps of the present epoch; counting them shuffles the whole store."""
        epoch = self.place.epoch
        if self._steps_of_epoch is None or self._steps_of_epoch[0] != epoch:
            steps = self._store.num_batches(self._spec.plan, epoch)
            self._steps_of_epoch = epoch, max(1, steps)
        return self._steps_of_epoch[1]

    def run(self, on_progress: OnProgress) -> None:
        """Train to the end; saves now and then, and when it stops for whatever reason.

        Args:
            on_progress: called with (progress, 1) after every step.

        Raises:
            InputError: training diverged; the last finite weights are kept.
            EnvironmentProblem: the state cannot be written.
            KeyboardInterrupt: passed on after the state is saved.
        """
        saved_s = self.place.trained_s
        self._drafter.train()
        recent: list[DraftLoss] = []
        try:
            for batch in self._batches():
                self._step(batch, recent)
                if len(recent) >= LOG_EVERY_STEPS:
                    self._log(recent)
                if self.place.trained_s - saved_s > SAVE_EVERY_S:
                    self.save()
                    saved_s = self.place.trained_s
                on_progress(self.progress, 1.0)
        finally:
            # A second Ctrl-C waits as well: what was trained is worth a second.
            with uninterrupted():
                self._log(recent)
                self.save()

    def save(self) -> None:
        """Write the state in one step; raises EnvironmentProblem."""
        state = {
            "spec": spec_to_json(self._spec),
            "place": asdict(self.place),
            "drafter": self._drafter.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        write_state(self._folder, state)

    def _load(self) -> None:
        state = read_state(self._folder, self._device)
        if state is None:
            return
        if state.spec != spec_to_json(self._spec):
            raise UsageError(
                f"{self._folder} holds a run with other settings; choose another --run or "
                "repeat the settings it was started with"
            )
        self._check_vocabulary(state.draft_token_ids)
        try:
            self._drafter.load_state_dict(state.drafter)
            self._optimizer.load_state_dict(state.optimizer)
        except (KeyError, RuntimeError, ValueError) as problem:
            raise self._other_drafter() from problem
        self.place = state.place
        cut_log(self._folder, self.place.num_steps)

    def _check_vocabulary(self, saved_ids: torch.Tensor | None) -> None:
        """The teacher's head and the labels were made for the drafter's own vocabulary."""
        if saved_ids is not None and not torch.equal(
            saved_ids, self._drafter.draft_token_ids.cpu()
        ):
            raise self._other_drafter()

    def _other_drafter(self) -> InputError:
        return InputError(
            f"{self._folder} holds a run of a drafter of another shape; choose another --run "
            "or delete the folder to train anew"
        )

    def _batches(self) -> Iterator[TrainingBatch]:
        """Batches from the present place to the end of the training."""
        plan = self._spec.plan
        while self.progress < 1.0:
            first = self.place.step_in_epoch
            for batch in self._store.training_batches(plan, self.place.epoch, first):
                yield batch
                if self.progress >= 1.0:
                    return
            self.place.epoch += 1
            self.place.step_in_epoch = 0

    def _step(self, batch: TrainingBatch, recent: list[DraftLoss]) -> None:
        """One step, appended to ``recent``; weights and place move together or not at all."""
        started = time.perf_counter()
        progress = self.progress
        loss, num_rows = self._loss(batch, progress)
        loss.total.backward()  # type: ignore[no-untyped-call]
        with uninterrupted():
            self._optimizer.step(progress)
            self.place.num_steps += 1
            self.place.step_in_epoch += 1
            self.place.num_rows += num_rows
            self.place.trained_s += time.perf_counter() - started
            recent.append(replace(loss, total=loss.total.detach()))

    def _loss(self, batch: TrainingBatch, progress: float) -> tuple[DraftLoss, int]:
        """Loss of a batch, and how many positions were drafted."""
        drafted, per_token = self._to_device(batch)
        with torch.autocast(self._device.type, dtype=torch.bfloat16):
            output = self._drafter(drafted)
            tokens = row_tokens(drafted, output.row_block, output.row_position)
            teacher = Teacher(
                hidden=per_token.hidden[tokens.teacher_rows],
                draft_head=self._draft_head,
                logsumexp=per_token.logsumexp[tokens.teacher_rows],
                argmax=per_token.argmax[tokens.teacher_rows],
            )
            weights = position_weights(
                output.row_position, tokens.labels >= 0, self._spec.position_decay
            )
            loss = drafter_loss(
                self._drafter,
                output.hidden,
                tokens,
                teacher,
                weights,
                self._spec.loss_at(progress),
            )
        return loss, int(output.row_block.shape[0])

    def _to_device(self, batch: TrainingBatch) -> tuple[DraftBatch, Teacher]:
        device = self._device
        drafted = DraftBatch(
            token_ids=batch.token_ids.to(device),
            aux_hidden=batch.aux_hidden.to(device),
            sequence_starts=batch.sequence_starts.to(device),
            anchors=batch.anchors.to(device),
            block_lengths=batch.block_lengths.to(device),
        )
        per_token = Teacher(
            hidden=batch.final_hidden.to(device),
            draft_head=self._draft_head,
            logsumexp=batch.logsumexp.to(device),
            argmax=batch.argmax.to(device).long(),
        )
        return drafted, per_token

    def _log(self, losses: list[DraftLoss]) -> None:
        """Write the means of these steps, and forget them."""
        if not losses:
            return
        place = self.place
        line = {
            "step": place.num_steps,
            "progress": round(self.progress, 5),
            "trained_s": round(place.trained_s, 2),
            "num_rows": place.num_rows,
            **{
                name: round(_mean([getattr(loss, name) for loss in losses]), 5)
                for name in ("total", "cross_entropy", "total_variation", "kl", "confidence")
            },
            "overlap": round(_mean([loss.rows.overlap.mean() for loss in losses]), 5),
            "greedy_accuracy": round(
                _mean([loss.rows.accepted_greedy.float().mean() for loss in losses]), 5
            ),
        }
        losses.clear()
        append_log(self._folder, line)


def spec_to_json(spec: TrainSpec) -> dict[str, Any]:
    """The run's settings as they are stored and compared."""
    stored: dict[str, Any] = json.loads(json.dumps(asdict(spec)))
    return stored


def _mean(values: list[torch.Tensor]) -> float:
    return float(torch.stack([value.detach().float() for value in values]).mean())
