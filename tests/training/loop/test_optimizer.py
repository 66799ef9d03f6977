"""The learning rate follows its schedule, and Muon's updates equal torch's up to rounding."""

from collections import defaultdict
from copy import deepcopy

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama
from helpers.variants import VARIANTS
from torch import nn

from jakiro.target.adapter import TargetAdapter
from training.config import OptimizerSettings
from training.loop import optimizer as optimizer_module
from training.loop.optimizer import (
    build_optimizer,
    learning_rate,
    set_learning_rate,
    take_muon_step,
)

STEPS = 101


@pytest.mark.parametrize(("schedule", "middle"), [("linear", 0.55), ("cosine", 0.55)])
def test_the_rate_rises_to_the_peak_and_falls_to_its_minimum(schedule: str, middle: float) -> None:
    settings = OptimizerSettings(
        learning_rate=2.0, warmup_steps=20, schedule=schedule, min_lr_ratio=0.1
    )
    rates = [learning_rate(settings, step, STEPS) for step in range(STEPS)]
    assert rates[:20] == pytest.approx([2.0 * (step + 1) / 20 for step in range(20)])
    assert rates[20] == pytest.approx(2.0)
    assert rates[60] == pytest.approx(2.0 * middle)
    assert rates[-1] == pytest.approx(0.2)
    assert sorted(rates[20:], reverse=True) == rates[20:]


def test_the_rate_follows_the_time_if_the_time_passes_faster_than_the_steps() -> None:
    settings = OptimizerSettings(learning_rate=1.0, warmup_steps=0, schedule="linear")
    settings = settings.model_copy(update={"min_lr_ratio": 0.0})
    assert learning_rate(settings, 10, STEPS, elapsed=0.7) == pytest.approx(0.3)
    assert learning_rate(settings, 80, STEPS, elapsed=0.7) == pytest.approx(0.2)
    assert learning_rate(settings, 10, STEPS, elapsed=1.0) == 0
    warming = settings.model_copy(update={"warmup_steps": 20})
    assert learning_rate(warming, 1, STEPS, elapsed=1.0) == 0
    assert learning_rate(warming, 1, STEPS, elapsed=0.1) == pytest.approx(0.1)


@pytest.mark.parametrize(("steps", "expected"), [(5, 0), (40, 4), (500, 50), (9000, 50)])
def test_an_automatic_warm_up_is_a_tenth_of_the_steps_and_at_most_50(
    steps: int, expected: int
) -> None:
    settings = OptimizerSettings(learning_rate=1.0)
    assert settings.warmup_for(steps) == expected
    rates = [learning_rate(settings, step, steps) for step in range(steps)]
    assert rates.index(max(rates)) == max(0, expected - 1)


def test_only_matrices_decay() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.RMSNorm(2))
    optimizer = build_optimizer(module, OptimizerSettings(weight_decay=0.3))
    decays = {
        parameter: group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert decays == {p: 0.3 if p.ndim > 1 else 0.0 for p in module.parameters()}


def test_muon_takes_the_hidden_matrices_and_adamw_the_rest() -> None:
    drafter = tiny_drafter(TargetAdapter(tiny_llama()))
    settings = OptimizerSettings(kind="muon", learning_rate=0.02)
    optimizer = build_optimizer(drafter, settings)
    by_muon, by_adamw = optimizer.param_groups
    names = {id(parameter): name for name, parameter in drafter.named_parameters()}
    assert {names[id(p)] for p in by_muon["params"]} >= {"experts.down", "experts.level_down"}
    assert "experts.router.weight" in {names[id(p)] for p in by_adamw["params"]}
    assert len(by_muon["params"]) + len(by_adamw["params"]) == len(names)
    block = tiny_drafter(TargetAdapter(tiny_llama()), VARIANTS["block-mixture-E2"])
    others = set(map(id, build_optimizer(block, settings).param_groups[1]["params"]))
    assert {id(block.memory_encoder.mixture), id(block.level_masks.tokens)} <= others

    set_learning_rate(optimizer, 0.02)
    before = {name: value.detach().clone() for name, value in drafter.named_parameters()}
    for parameter in drafter.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    for name, value in drafter.named_parameters():
        assert not torch.equal(value, before[name]), name
    # An orthogonalized update has singular values near 1 at any scale of the gradient.
    change = (drafter.experts.down - before["experts.down"]) / 0.02
    assert torch.linalg.svdvals(change).max() < 1.3


def test_muon_agrees_with_torchs_up_to_bfloat16() -> None:
    start = torch.randn(2, 16, 12, generator=torch.Generator().manual_seed(0))
    ours = [nn.Parameter(matrix.clone()) for matrix in start]
    theirs = [nn.Parameter(matrix.clone()) for matrix in start]
    reference, state = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.0), defaultdict(dict)
    for step in range(3):
        gradients = torch.randn(2, 16, 12, generator=torch.Generator().manual_seed(step + 1))
        for parameter, gradient in zip([*ours, *theirs], [*gradients, *gradients], strict=True):
            parameter.grad = gradient.clone()
        reference.step()
        take_muon_step(ours, state, lr=0.1)
    for got, expected in zip(ours, theirs, strict=True):
        assert (got - expected).abs().max() < 0.01


def test_the_state_of_muon_is_loaded_and_copied() -> None:
    layer = nn.Linear(4, 4)
    groups = [{"params": [layer.weight], "muon": True}, {"params": [layer.bias]}]
    own = optimizer_module.MuonBesideAdamW(groups, lr=0.1, fused=True)
    layer(torch.randn(2, 4)).sum().backward()
    own.step()
    own.load_state_dict(own.state_dict())
    for other in (own, deepcopy(own)):
        assert [group.get("muon", False) for group in other.param_groups] == [True, False]
