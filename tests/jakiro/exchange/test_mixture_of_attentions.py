"""Imported drafters of Mixture of Attentions draft as they were published to."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.imports import assert_drafts_equal, imported
from helpers.models import tiny_llama
from helpers.published import Weights, save_published
from helpers.published_moa import PublishedMoa, moa_config, moa_weights

from jakiro.errors import CheckpointError, TargetMismatch
from jakiro.exchange.checkpoint import read_checkpoint
from jakiro.exchange.families import plan_import
from jakiro.exchange.plan import ImportPlan, build_drafter
from jakiro.target.adapter import TargetAdapter
from jakiro.target.record import record_target

FORMS: dict[str, tuple[Weights, dict[str, Any]]] = {
    "llama 3": (moa_weights(), {"rope_theta": 500_000.0}),
    "qwen2": (moa_weights(qkv_bias=True), {}),
    "converted for vLLM": (moa_weights(), {"model_type": "moa_spec", "num_hidden_layers": None}),
}


def _plan(folder: Path, weights: Weights, config: dict[str, Any] | None = None) -> ImportPlan:
    return plan_import(read_checkpoint(save_published(folder, weights, config or moa_config())))


@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("name", FORMS)
def test_drafts_are_those_of_the_published_forward_pass(
    name: str, length: int, tmp_path: Path
) -> None:
    weights, changes = FORMS[name]
    model, config = tiny_llama().double(), moa_config() | changes
    drafter = imported(save_published(tmp_path, weights, config), model)
    theta = config.get("rope_theta", 10_000.0)
    assert_drafts_equal(drafter, PublishedMoa(weights, model, theta=theta), length)


@pytest.mark.parametrize("tail_layers", [1, 3])
def test_tail_layers_of_the_target_follow_the_drafter(tail_layers: int, tmp_path: Path) -> None:
    model = tiny_llama(num_hidden_layers=5).double()
    plan = _plan(tmp_path, moa_weights())
    candidates = plan.candidates(5)
    assert [each.tail_layers for each in candidates] == [0, 1, 2, 3]
    target = TargetAdapter(model)
    weights = plan.table.converted()
    record = record_target(target.spec, "tiny")
    drafter = build_drafter(candidates[tail_layers], record, weights).to(model.dtype)
    assert_drafts_equal(drafter, PublishedMoa(moa_weights(), model, tail_layers), length=6)


def test_a_target_with_few_layers_has_fewer_possible_tail_layers(tmp_path: Path) -> None:
    plan = _plan(tmp_path, moa_weights())
    assert [each.tail_layers for each in plan.candidates(2)] == [0, 1]
    report = "\n".join(plan.lines())
    assert "open: tail_layers 0 or tail_layers 1 or tail_layers 2 or tail_layers 3" in report
    assert [name for name in moa_weights() if name not in report] == []


ODD = {
    "self_attention.self_attn.q_proj.weight": torch.zeros(3 * 8, 32),
    "layer_self_attention.self_attn.k_proj.weight": torch.zeros(3 * 6, 32),
    "layer_self_attention.self_attn.v_proj.bias": torch.zeros(12),
    "cross_attention.self_attn.q_proj.bias": torch.zeros(32),
}


@pytest.mark.parametrize("name", ODD)
def test_layers_that_this_project_does_not_have_are_named(name: str, tmp_path: Path) -> None:
    message = {"q": "a divisor of 3 heads", "k": "a divisor of 4 heads"}.get(name[-13], name)
    with pytest.raises(CheckpointError, match=message):
        _plan(tmp_path, moa_weights() | {name: ODD[name]})


def test_a_target_with_other_keys_and_values_is_refused(tmp_path: Path) -> None:
    folder = save_published(tmp_path, moa_weights(), moa_config())
    with pytest.raises(TargetMismatch, match=r"keys and values.*heads=2.*got: .*heads=4"):
        imported(folder, tiny_llama(num_key_value_heads=4))
