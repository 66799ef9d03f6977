"""Imported drafters of EAGLE-1, EAGLE-2, HASS and Jakiro draft as they were published to."""

from pathlib import Path
from typing import Any

import pytest
from helpers.imports import assert_drafts_equal, imported
from helpers.models import tiny_drafter, tiny_llama
from helpers.published import (
    PublishedDrafter,
    Weights,
    eagle_config,
    eagle_weights,
    jakiro_weights,
    save_published,
)

from jakiro.errors import CheckpointError
from jakiro.exchange.checkpoint import read_checkpoint
from jakiro.exchange.eagle import layer_config
from jakiro.exchange.families import plan_import
from jakiro.target.adapter import TargetAdapter

HEADS: dict[str, tuple[Weights, dict[str, Any]]] = {
    "eagle": (eagle_weights(), {}),
    "eagle without bias": (eagle_weights(bias=False), {"bias": False}),
    "eagle for qwen2": (eagle_weights(qkv_bias=True), {"qkv_bias": True}),
    "eagle for qwen3": (eagle_weights(qk_norm=True), {}),
    "eagle with norms of its input": (eagle_weights(input_norms=True), {}),
    "eagle for llama 3": (eagle_weights(), {"rope_theta": 500_000.0, "rms_norm_eps": 1e-5}),
    "jakiro": (jakiro_weights(), {"num_local_experts": 2, "num_experts_per_tok": 2}),
}


@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_those_of_the_published_forward_pass(
    name: str, length: int, tmp_path: Path
) -> None:
    weights, changes = HEADS[name]
    model, config = tiny_llama().double(), eagle_config(**changes)
    drafter = imported(save_published(tmp_path, weights, config), model)
    theta = config.get("rope_theta", 10_000.0)
    published = PublishedDrafter(weights, model, config["rms_norm_eps"], theta)
    assert_drafts_equal(drafter, published, length)


@pytest.mark.parametrize("layout", ["bin", "prefixed", "sharded"])
def test_every_layout_of_files_is_read(layout: str, tmp_path: Path) -> None:
    weights, model = eagle_weights(), tiny_llama().double()
    drafter = imported(save_published(tmp_path, weights, eagle_config(), layout), model)
    assert_drafts_equal(drafter, PublishedDrafter(weights, model), length=5, passes=3)


def test_the_rotary_base_of_the_target_is_never_used(tmp_path: Path) -> None:
    folder = save_published(tmp_path, eagle_weights(), eagle_config())
    drafter = imported(folder, tiny_llama(rope_theta=500_000.0))
    assert drafter.config.settings.trunk.rope_theta == 10_000.0


def test_copies_of_the_targets_matrices_are_compared_and_dropped(tmp_path: Path) -> None:
    model = tiny_llama().double()
    copies = {
        "embed_tokens.weight": model.model.embed_tokens.weight.detach().half(),
        "lm_head.weight": model.lm_head.weight.detach().bfloat16(),
        "layers.0.self_attn.rotary_emb.inv_freq": model.lm_head.weight.detach()[0, :4].clone(),
    }
    weights = eagle_weights()
    drafter = imported(save_published(tmp_path, weights | copies, eagle_config()), model)
    assert_drafts_equal(drafter, PublishedDrafter(weights, model), length=3, passes=2)


def test_the_report_names_every_tensor(tmp_path: Path) -> None:
    weights = jakiro_weights()
    plan = plan_import(read_checkpoint(save_published(tmp_path, weights, eagle_config())))
    report = "\n".join(plan.lines())
    assert "family: Jakiro as published" in report
    assert "contrastive_head: true" in report
    assert [name for name in weights if name not in report] == []


def test_jakiro_star_is_refused_by_name(tmp_path: Path) -> None:
    weights = jakiro_weights()
    weights["layers.0.mlp_moe.gate.weight"] = weights["layers.0.mlp_moe.gate.weight"][:2]
    folder = save_published(tmp_path, weights, eagle_config())
    with pytest.raises(CheckpointError, match=r"Jakiro\*, whose experts"):
        plan_import(read_checkpoint(folder))


def test_a_drafter_of_this_project_needs_no_import(tmp_path: Path) -> None:
    tiny_drafter(TargetAdapter(tiny_llama())).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="a drafter of this project; remedy: use it as it is"):
        plan_import(read_checkpoint(tmp_path))


def test_values_that_are_absent_have_the_defaults_of_llama() -> None:
    config = eagle_config(rope_theta=None, rope_scaling=None)
    for name in ("num_key_value_heads", "rms_norm_eps"):
        del config[name]
    read = layer_config(config, "head")
    assert (read.heads.num_kv_heads, read.heads.head_dim) == (4, 8)
    assert (read.heads.rope_theta, read.rms_norm_eps) == (10_000.0, 1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_theta": 5e5}},
    ],
)
def test_every_name_of_the_rotary_base_is_read(changes: dict[str, Any]) -> None:
    assert layer_config(eagle_config(**changes), "head").heads.rope_theta == 5e5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": "four"}, "a usable num_attention_heads"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "a usable rope_theta"),
        ({"hidden_act": "gelu"}, "hidden_act silu; got: gelu"),
        ({"sliding_window": 512}, "sliding_window None; got: 512"),
        ({"rope_scaling": {"type": "odd", "factor": 2.0}}, "a usable kind.*llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1}}, "known .*got: mscale"),
        ({"num_key_value_heads": 3}, "remainder of query heads.*got: 1"),
    ],
)
def test_what_cannot_be_reproduced_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        layer_config(eagle_config(**changes), "head")
