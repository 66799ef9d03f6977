"""Targets and drafters are set up as requested, and contradictory requests are refused."""

from typing import Any

import pytest
from helpers.models import tiny_drafter, tiny_llama

from inference.autotune.setup import (
    largest_trees,
    refuse_unusable,
    set_up_target,
    trees_of_size,
)
from inference.trees.shape import TreeShape
from jakiro.drafter import JakiroDrafter
from jakiro.drafter_settings import DrafterSettings
from jakiro.errors import ConfigError, TargetMismatch
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.settings import validate_settings


def test_misspelt_trees_are_refused() -> None:
    with pytest.raises(ConfigError, match="tree= cannot be used"):
        refuse_unusable("auto2")


def test_a_target_computes_as_requested_in_evaluation_mode() -> None:
    model = tiny_llama().train()
    target, threads = set_up_target(model, threads=1)
    assert not model.training
    assert threads == 1
    assert target.modules.num_fused == 3
    assert not target.is_compiled


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


def _drafter(autoregressive: int, parallel: int) -> JakiroDrafter:
    schedule = {"autoregressive_levels": autoregressive, "parallel_levels": parallel}
    values = {
        "trunk": {"kind": "hybrid", "num_heads": 2, "num_kv_heads": 1, "head_dim": 16},
        "memory": {"num_heads": 2, "head_dim": 8, "mlp_width": 16},
        "experts": {"intermediate_size": 16},
        "schedule": schedule,
    }
    settings = validate_settings(DrafterSettings, values, source="the test")
    return tiny_drafter(TargetAdapter(tiny_llama()), settings)


def test_trees_of_eight_candidates_are_those_of_the_published_figures() -> None:
    plan = trees_of_size(_drafter(2, 1), 8)
    levels = {"autoregressive_levels": 2, "parallel_levels": 1, "num_nodes": 8}
    assert plan.greedy == TreeShape(**levels, children=4, breadth=3)
    assert plan.sampling == TreeShape(**levels, children=2, breadth=1, sampled=True)


@pytest.mark.parametrize(
    ("levels", "num_nodes"), [((1, 0), 8), ((2, 0), 9), ((2, 1), 1), ((2, 1), 60), ((5, 1), 5)]
)
def test_deterministic_trees_are_full_and_sampled_trees_fit_uncut(
    levels: tuple[int, int], num_nodes: int
) -> None:
    plan = trees_of_size(_drafter(*levels), num_nodes)
    if sum(levels) > 1:  # a single level has only the root's children
        assert plan.greedy.max_nodes == num_nodes
        assert plan.sampling.max_nodes > num_nodes / 3
    assert sum(plan.sampling.level_sizes) == plan.sampling.max_nodes <= num_nodes
    assert plan.sampling.depth == plan.greedy.depth == min(sum(levels), num_nodes)
    larger = trees_of_size(_drafter(*levels), num_nodes + 1)
    assert larger.sampling.max_nodes >= plan.sampling.max_nodes


@pytest.mark.parametrize(("levels", "passes"), [((4, 0), 4), ((2, 1), 3), ((6, 2), 6)])
def test_automatic_trees_are_as_deep_as_in_training(levels: tuple[int, int], passes: int) -> None:
    plan = largest_trees(_drafter(*levels))
    assert {shape.autoregressive_levels for shape in plan.shapes} == {passes}
    assert {shape.parallel_levels for shape in plan.shapes} == {levels[1]}
