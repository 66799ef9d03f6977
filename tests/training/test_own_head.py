"""Runs of drafters with the architecture of EAGLE-3, whose head is their own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training import curve, tiny_run
from helpers.variants import OWN, WIDE
from transformers import AutoModelForCausalLM

from inference.decoder import SpeculativeDecoder
from jakiro.drafter import JakiroDrafter
from training.config import TrainSettings
from training.setup.initialization import initialize
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
    settings = _run(workshop, steps=30, engine=engine, checkpoint={"keep_best": False})
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


def test_the_head_starts_with_the_targets_rows_of_the_draft_vocabulary(workshop: Path) -> None:
    settings = _run(workshop)
    inputs = prepare(settings)
    drafter = inputs.build_drafter()
    initialize(drafter, settings, inputs.target)
    expected = inputs.target.head.weight[drafter.draft_ids]
    assert torch.equal(drafter.own_head.weight, expected)
    assert len(expected) == 24
