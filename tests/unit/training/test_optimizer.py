"""The optimiser pair: who gets what, the schedule, and taking up a saved state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from specbench.errors import InputError, UsageError
from specbench.training.optimizer import DrafterOptimizer, OptimizerSpec


def make() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"proj": nn.Linear(6, 6), "lm_head": nn.Linear(6, 9, bias=False)})


def train(model: nn.ModuleDict, optimizer: DrafterOptimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(32, 6, generator=generator)
        targets = (inputs @ torch.arange(54.0).view(6, 9).sin()).argmax(dim=1)
        loss = nn.functional.cross_entropy(model["lm_head"](model["proj"](inputs)), targets)
        loss.backward()
        optimizer.step(step / 40)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_it_learns(name: str) -> None:
    model = make()
    optimizer = DrafterOptimizer(
        model.named_parameters(), OptimizerSpec(name=name, learning_rate=0.05)
    )
    losses = train(model, optimizer, range(40))
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5])


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_a_saved_state_goes_on_exactly(name: str) -> None:
    spec = OptimizerSpec(name=name, learning_rate=0.05)
    whole = make()
    train(whole, DrafterOptimizer(whole.named_parameters(), spec), range(20))
    first = make()
    optimizer = DrafterOptimizer(first.named_parameters(), spec)
    train(first, optimizer, range(10))
    second = make()
    second.load_state_dict(first.state_dict())
    again = DrafterOptimizer(second.named_parameters(), spec)
    again.load_state_dict(optimizer.state_dict())
    train(second, again, range(10, 20))
    for expected, found in zip(whole.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_tables_and_vectors_stay_with_adamw() -> None:
    model = make()
    optimizer = DrafterOptimizer(model.named_parameters(), OptimizerSpec())
    adamw, muon = optimizer.state_dict()
    assert sum(len(group["params"]) for group in adamw["param_groups"]) == 2
    assert sum(len(group["params"]) for group in muon["param_groups"]) == 1


def test_frozen_weights_do_not_move() -> None:
    model = make()
    model["lm_head"].weight.requires_grad_(False)
    before = model["lm_head"].weight.clone()
    train(model, DrafterOptimizer(model.named_parameters(), OptimizerSpec()), range(5))
    assert torch.equal(model["lm_head"].weight, before)


def test_the_rate_rises_peaks_and_falls() -> None:
    spec = OptimizerSpec(learning_rate=1.0, warmup_share=0.1, final_share=0.05)
    rates = [spec.rate_at(share / 100) for share in range(101)]
    assert max(rates) == pytest.approx(1.0)
    assert rates[10] == pytest.approx(1.0)
    assert rates[0] < 0.02
    assert rates[100] == pytest.approx(0.05)
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert spec.rate_at(1.5) == rates[100]


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(UsageError, match="muon or adamw"):
        OptimizerSpec(name="sgd")


@pytest.mark.parametrize(
    "changes",
    [
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"weight_decay": -0.1},
        {"warmup_share": 1.0},
        {"final_share": 2.0},
    ],
)
def test_values_out_of_range_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        OptimizerSpec(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("warmup", [0.0, 1e-4, 0.02, 0.5])
def test_the_rate_never_exceeds_its_peak(warmup: float) -> None:
    spec = OptimizerSpec(learning_rate=1.0, warmup_share=warmup)
    rates = [spec.rate_at(step / 10_000) for step in range(10_001)]
    assert min(rates) > 0
    assert max(rates) <= 1.0


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_a_gradient_that_is_not_finite_moves_nothing(name: str) -> None:
    model = make()
    optimizer = DrafterOptimizer(model.named_parameters(), OptimizerSpec(name=name))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    (model["proj"].weight.sum() * float("inf") + model["lm_head"].weight.sum()).backward()
    with pytest.raises(InputError, match="lower --learning-rate"):
        optimizer.step(0.5)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


def test_states_of_another_kind_are_refused() -> None:
    model = make()
    muon = DrafterOptimizer(model.named_parameters(), OptimizerSpec())
    adamw = DrafterOptimizer(model.named_parameters(), OptimizerSpec(name="adamw"))
    with pytest.raises(ValueError, match="another kind"):
        adamw.load_state_dict(muon.state_dict())
