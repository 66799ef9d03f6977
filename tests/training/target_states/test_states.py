"""Shards contain exactly the target's outputs, so a run learns the same from either."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import tiny_family
from helpers.models import tiny_settings
from helpers.quick import mostly_slow
from helpers.target_states import (
    assert_same,
    both_views,
    offline_run,
    tensors,
    with_drafter,
    write_target_states,
)
from helpers.training import tiny_run
from helpers.variants import VARIANTS
from torch import nn
from transformers import AutoModelForCausalLM

from jakiro.drafter import JakiroDrafter
from jakiro.drafter_settings import DrafterSettings
from training.config import TrainSettings
from training.loop.metrics import read_metrics
from training.setup.preparation import prepare
from training.train import train

# Drafters that read different states; experts and levels read no target states.
KINDS = (
    *("E2-mixture-P1", "kv-subset-projected", "kv-side-by-side", "hidden", "last-feature"),
    *("hidden-unordered", "tail-2-E1", "hybrid-tail-1", "draft-vocabulary", "feedback-sum-P1"),
    *("feedback-fused", "hybrid-mixture-P2", "hybrid-sum-hidden-fused"),
)


# One drafter for each kind of state, and for combinations of kinds.
QUICK = (
    *("E2-mixture-P1", "kv-side-by-side", "hidden-unordered", "tail-2-E1", "feedback-fused"),
    "hybrid-sum-hidden-fused",
)


@pytest.mark.parametrize(
    "kind",
    mostly_slow(KINDS, quick=QUICK),
)
def test_batches_from_fp32_shards_are_bit_by_bit_those_of_the_target(
    workshop: Path, kind: str
) -> None:
    settings = with_drafter(offline_run(workshop), VARIANTS[kind])
    write_target_states(settings)
    for online, offline in both_views(settings):
        assert_same(online, offline)


@pytest.mark.parametrize("kind", ["E2-mixture-P1", "hybrid-tail-1", "feedback-fused"])
def test_batches_from_bf16_shards_are_those_of_the_target_rounded_once(
    workshop: Path, kind: str
) -> None:
    settings = with_drafter(offline_run(workshop, "bf16"), VARIANTS[kind])
    write_target_states(settings)
    for online, offline in both_views(settings):
        expected, got = tensors(online), tensors(offline)
        assert torch.equal(expected.pop("embeddings"), got.pop("embeddings"))
        for name, tensor in expected.items():
            assert not torch.equal(tensor, got[name])
            assert torch.equal(tensor.bfloat16().float(), got[name]), name


@pytest.mark.parametrize(("target", "drafter"), [("bf16", "fp32"), ("bf16", "bf16")])
def test_nothing_of_a_bf16_target_is_lost_in_bf16_shards(
    workshop: Path, target: str, drafter: str
) -> None:
    dtypes: dict[str, Any] = {"target": {"dtype": target}, "engine": {"dtype": drafter}}
    settings = offline_run(workshop, "bf16", **dtypes)
    write_target_states(settings)
    for online, offline in both_views(settings):
        assert_same(online, offline)


@pytest.mark.parametrize(
    ("family", "drafter"),
    [
        ("gemma4, heads of two widths", tiny_settings(common_width=12)),
        ("deepseek_v3", tiny_settings(combine="sum", parallel_levels=0, tail_layers=1)),
    ],
)
def test_states_of_targets_of_any_geometry_are_stored(
    workshop: Path, family: str, drafter: DrafterSettings
) -> None:
    per_layer = {"vocab_size_per_layer_input": 300} if "gemma4" in family else {}
    model = tiny_family(family, vocab_size=300, **per_layer)
    settings = with_drafter(offline_run(workshop), drafter)
    write_target_states(settings, model)
    for online, offline in both_views(settings, model):
        assert_same(online, offline)


@pytest.mark.parametrize(
    "kind", [pytest.param("E2-mixture-P1", marks=pytest.mark.slow), "hybrid-tail-1"]
)
def test_an_offline_run_has_the_curve_of_the_online_one(workshop: Path, kind: str) -> None:
    changes: dict[str, Any] = {"steps": 4, "evaluation": {"every": 2, "num_prompts": 1}}
    runs = [
        with_drafter(make(workshop, **changes, run_folder=str(workshop / name)), VARIANTS[kind])
        for name, make in (("online", tiny_run), ("offline", offline_run))
    ]
    write_target_states(runs[1])
    for settings in runs:
        train(settings)
    online, offline = map(_lines, runs)
    assert len(online) == 7  # four steps, three evaluations
    assert online == offline
    weights = [JakiroDrafter.from_pretrained(run.run_folder / "drafter") for run in runs]
    for one, other in zip(*(drafter.parameters() for drafter in weights), strict=True):
        assert torch.equal(one, other)


def test_a_target_whose_states_are_on_disk_is_not_run_again(workshop: Path) -> None:
    changes: dict[str, Any] = {"steps": 2, "evaluation": {"num_prompts": 0}}
    settings = offline_run(workshop, **changes)
    write_target_states(settings)
    model = AutoModelForCausalLM.from_pretrained(workshop / "target")
    calls: list[nn.Module] = []
    model.model.layers[0].register_forward_hook(lambda layer, *_: calls.append(layer))
    prepare(settings, model)  # always runs the target
    of_preparation = len(calls)
    train(settings, model=model)
    assert len(calls) == 2 * of_preparation
    train(tiny_run(workshop, **changes, run_folder=str(workshop / "online")), model=model)
    assert len(calls) > 3 * of_preparation


def _lines(settings: TrainSettings) -> list[dict[str, Any]]:
    """Return the recorded lines without their speed."""
    lines = read_metrics(settings.run_folder)
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]
