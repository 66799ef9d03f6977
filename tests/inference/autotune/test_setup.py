"""Targets and drafters are set up as requested, and contradictory requests are refused."""

from typing import Any

import pytest
from helpers.models import tiny_drafter, tiny_llama

from inference.autotune.setup import refuse_unusable, set_up_drafter, set_up_target
from inference.drafters.trained.drafter import TrainedDrafter
from inference.trees.shape import TreePlan, TreeShape
from jakiro.errors import ConfigError, TargetMismatch
from jakiro.target.adapter import TargetAdapter


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"tree": "auto2"}])
def test_unusable_arguments_are_refused(wrong: dict[str, object]) -> None:
    usable = {"tree": "auto", "threads": None}
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        refuse_unusable(**usable | wrong)


def test_a_target_computes_as_requested_in_evaluation_mode() -> None:
    model = tiny_llama().train()
    target, threads = set_up_target(model, threads=1)
    assert not model.training
    assert threads == 1
    assert target.modules.num_fused == 3
    assert not target.is_compiled


def test_compiled_layers_are_the_targets_own() -> None:
    model = tiny_llama()
    target, _ = set_up_target(model, compiled=True)
    assert target.is_compiled
    assert target.modules.layers is model.model


@pytest.mark.parametrize("other", ["captured", "batch_invariant"])
def test_compilation_cannot_be_combined_with_what_it_cannot_do(other: str) -> None:
    wanted: dict[str, Any] = {other: True}
    with pytest.raises(ConfigError, match=f"{other}=True and compiled=True cannot be combined"):
        set_up_target(tiny_llama(), compiled=True, **wanted)


def test_a_drafter_of_another_target_is_refused_before_anything_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = tiny_drafter(TargetAdapter(tiny_llama(vocab=9)))
    monkeypatch.setattr("inference.autotune.setup.choose_threads", None)  # cannot be called
    with pytest.raises(TargetMismatch, match="vocab"):
        set_up_target(tiny_llama(vocab=7), threads="auto", drafter=drafter)


def test_a_trained_drafter_gets_its_target_and_trees() -> None:
    target, _ = set_up_target(tiny_llama())
    shape = TreeShape(num_nodes=3)
    drafter = set_up_drafter(tiny_drafter(target), target, None, shape)
    assert isinstance(drafter, TrainedDrafter)
    assert drafter.target is target
    assert drafter.plan == TreePlan.of(shape)
