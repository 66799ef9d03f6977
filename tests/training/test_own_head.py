"""Runs of drafters with the architecture of EAGLE-3, whose head is their own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import tiny_llama, tiny_settings
from helpers.training import curve, tiny_run
from helpers.variants import EAGLE, OWN, WIDE
from transformers import AutoModelForCausalLM

from inference.decoder import SpeculativeDecoder
from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from jakiro.target.adapter import TargetAdapter
from training.config import TrainSettings
from training.setup.initialization import check_initialization, initialize, is_fitted
from training.setup.preparation import prepare
from training.train import train

SIZES = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
EAGLE3 = {
    "trunk": WIDE | SIZES | {"ttt_steps": 2},
    "experts": {"num_experts": 1, "combine": "sum", **OWN},
    "schedule": {"autoregressive_levels": 2, "parallel_levels": 0},
    "draft_vocab_size": 24,
}
TOKENS = {"token_weight": 1.0, "feature_weight": 0.0, "contrast_weight": 0.0}


def _run(folder: Path, **changes: Any) -> TrainSettings:
    start = {"attention_layer": None, "fit_tokens": 0}
    base = {"drafter": EAGLE3, "objective": TOKENS, "initialize": start}
    return tiny_run(folder, **(base | {"evaluation": {"num_prompts": 0}} | changes))


@pytest.mark.parametrize(
    "engine",
    [pytest.param({}, marks=pytest.mark.slow), {"dtype": "bf16", "zero_stage": 2}],
    ids=str,
)
def test_training_lowers_the_loss_and_changes_the_head(
    workshop: Path, engine: dict[str, Any]
) -> None:
    settings = _run(workshop, steps=30, engine=engine, checkpoint={"finish_with_best": False})
    drafter = JakiroDrafter.from_pretrained(train(settings))
    losses = curve(settings)
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    target = AutoModelForCausalLM.from_pretrained(workshop / "target")
    rows = target.lm_head.weight[drafter.draft_ids]
    moved = (drafter.own_head.weight.float() - rows).abs()
    assert 0 < moved.mean() < rows.abs().mean()
    assert not drafter.head_norm.weight.eq(1).all()
    decoder = SpeculativeDecoder(target, drafter, tree="fixed")
    output = decoder.generate([5, 6, 7], max_new_tokens=8, temperature=0)
    assert (
        output.new_token_ids
        == SpeculativeDecoder(target)
        .generate([5, 6, 7], max_new_tokens=8, temperature=0)
        .new_token_ids
    )


def test_adapters_of_the_head_are_trained_and_merged(workshop: Path) -> None:
    start = train(_run(workshop, steps=2))
    settings = _run(
        workshop,
        steps=4,
        initialize={"drafter": str(start), "attention_layer": None, "fit_tokens": 0},
        lora={"rank": 4, "targets": ["own_head", "down"]},
        checkpoint={"finish_with_best": False},
        run_folder=f"{workshop}/adapted",
    )
    before, after = (JakiroDrafter.from_pretrained(path) for path in (start, train(settings)))
    assert not torch.equal(after.own_head.weight, before.own_head.weight)
    assert torch.equal(after.head_norm.weight, before.head_norm.weight)


@pytest.mark.parametrize("trunk", [WIDE, EAGLE], ids=["wide", "eagle"])
def test_a_trunk_without_a_norm_starts_with_random_attention(
    trunk: dict[str, Any], workshop: Path
) -> None:
    drafter = EAGLE3 | {"trunk": trunk | SIZES}
    auto = _run(workshop, drafter=drafter, initialize={"attention_layer": "auto"})
    target = TargetAdapter(tiny_llama(vocab=300))
    assert not is_fitted(auto, target)
    check_initialization(auto, target)
    named = _run(workshop, drafter=drafter, initialize={"attention_layer": -1})
    with pytest.raises(ConfigError, match="attention_norm can start with a layer of the target"):
        check_initialization(named, target)


def test_the_head_starts_with_the_targets_rows_of_the_draft_vocabulary(workshop: Path) -> None:
    settings = _run(workshop)
    inputs = prepare(settings)
    drafter = inputs.build_drafter()
    initialize(drafter, settings, inputs.target)
    expected = inputs.target.head.weight[drafter.draft_ids]
    assert torch.equal(drafter.own_head.weight, expected)
    assert len(expected) == 24


def test_tail_layers_take_no_own_head() -> None:
    tail = {"combine": "sum", "parallel_levels": 0, "tail_layers": 1}
    for changes in ({"head": "own"}, {"output_norm": "feedback"}):
        with pytest.raises(ValueError, match=r"experts\.head=target and experts\.output_norm=none"):
            tiny_settings(**tail, **changes)
