"""Imported drafters of EAGLE-3 in both layouts draft as they were published to."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.imports import assert_drafts_equal, imported
from helpers.models import tiny_llama
from helpers.published import (
    WIDE_DIM,
    PublishedEagle3,
    Weights,
    as_speculators,
    eagle3_config,
    eagle3_weights,
    frequencies_of,
    save_published,
)

from jakiro.errors import CheckpointError
from jakiro.exchange.checkpoint import read_checkpoint
from jakiro.exchange.families import plan_import
from jakiro.exchange.plan import ImportPlan, build_drafter, distinctions
from jakiro.target.adapter import TargetAdapter
from jakiro.target.record import record_target

LAYERS = (1, 3, 5)
IDS = {"eagle_aux_hidden_state_layer_ids": list(LAYERS)}


def six_layer_target() -> Any:
    """Return a target of six layers in float64."""
    return tiny_llama(num_hidden_layers=6).double()


def planned(folder: Path, weights: Weights, config: dict[str, Any]) -> ImportPlan:
    """Write a published drafter, and return the plan of its import."""
    return plan_import(read_checkpoint(save_published(folder, weights, config)))


@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("layout", ["eagle", "speculators"])
def test_drafts_are_those_of_the_published_forward_pass(
    layout: str, length: int, tmp_path: Path
) -> None:
    weights, config, model = eagle3_weights(), eagle3_config(**IDS), six_layer_target()
    saved = (weights, config)
    if layout == "speculators":
        saved = as_speculators(weights, config, norm_before_residual=False)
    drafter = imported(save_published(tmp_path, *saved), model)
    assert_drafts_equal(drafter, PublishedEagle3(weights, model, LAYERS), length)


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "all tokens": ({"num_drafted": 61}, {"num_drafted": 61}, {}),
    "eagle-3.1": (
        {"fused": "each"},
        {"norm_output": True, "fc_norm": True},
        {"feeds_normed_back": True},
    ),
    "gpt-oss": ({"fused": "all"}, {"norm_before_fc": True}, {}),
    "qwen3": ({"qk_norm": True}, {}, {}),
    "normed residual": ({}, {"norm_before_residual": True}, {"residual_is_normed": True}),
}


@pytest.mark.parametrize("name", FORMS)
def test_other_forms_of_the_architecture_are_imported(name: str, tmp_path: Path) -> None:
    weights_of, config_of, published_as = FORMS[name]
    weights, config, model = (
        eagle3_weights(**weights_of),
        eagle3_config(**IDS, **config_of),
        six_layer_target(),
    )
    drafter = imported(save_published(tmp_path, weights, config), model)
    published = PublishedEagle3(weights, model, LAYERS, **published_as)
    for length in (1, 7):
        assert_drafts_equal(drafter, published, length)


def _llama3_frequencies() -> torch.Tensor:
    """Return the angles of Llama 3.1 with factor 4, parameters 1 and 3, and 16 positions."""
    angles = frequencies_of(10_000.0, WIDE_DIM)
    wavelength = 2 * math.pi / angles
    share = ((16 / wavelength - 1) / (3 - 1)).clamp(0, 1)
    return share * angles + (1 - share) * angles / 4


def _yarn_frequencies() -> torch.Tensor:
    """Return angles per position of YaRN (arXiv 2309.00071): factor 4, 16 positions."""

    def pair_with(rotations: float) -> float:
        return WIDE_DIM * math.log(16 / (rotations * 2 * math.pi)) / (2 * math.log(10_000.0))

    low, high = max(math.floor(pair_with(2.0)), 0), math.ceil(pair_with(0.5))
    changed = ((torch.arange(WIDE_DIM // 2) - low) / (high - low)).clamp(0, 1)
    angles = frequencies_of(10_000.0, WIDE_DIM)
    return changed * angles / 4 + (1 - changed) * angles


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 3.0, "original_max_position_embeddings": 16}
YARN = {"beta_fast": 2.0, "beta_slow": 0.5, "original_max_position_embeddings": 16}
ROPES = {
    "llama3": ({"factor": 4.0, **LLAMA3}, _llama3_frequencies(), 1.0),
    "linear": ({"factor": 4.0}, frequencies_of(10_000.0, WIDE_DIM) / 4, 1.0),
    "yarn": ({"factor": 4.0, **YARN}, _yarn_frequencies(), 0.1 * math.log(4) + 1),
}


@pytest.mark.parametrize(
    ("kind", "key"),
    [("llama3", "rope_scaling"), ("linear", "rope_scaling"), ("yarn", "rope_parameters")],
)
def test_rotary_embeddings_for_long_contexts_are_those_of_their_description(
    kind: str, key: str, tmp_path: Path
) -> None:
    parameters, frequencies, scale = ROPES[kind]
    named = {"type" if key == "rope_scaling" else "rope_type": kind, **parameters}
    weights, model = eagle3_weights(), six_layer_target()
    folder = save_published(tmp_path, weights, eagle3_config(**IDS, **{key: named}))
    published = PublishedEagle3(weights, model, LAYERS)
    published.frequencies, published.scale = frequencies, scale
    assert_drafts_equal(imported(folder, model), published, length=30)


def test_a_draft_vocabulary_that_is_not_sorted_is_sorted_with_its_rows(tmp_path: Path) -> None:
    weights, model = eagle3_weights(), six_layer_target()
    order = torch.randperm(23, generator=torch.Generator().manual_seed(1))
    ids = (torch.arange(23) + weights["d2t"])[order]
    mixed = weights | {
        "d2t": ids - torch.arange(23),
        "lm_head.weight": weights["lm_head.weight"][order],
    }
    drafter = imported(save_published(tmp_path, mixed, eagle3_config(**IDS)), model)
    assert drafter.draft_ids.tolist() == sorted(ids.tolist())
    assert_drafts_equal(drafter, PublishedEagle3(mixed, model, LAYERS), length=3)


def _with_offset(index: int, offset: int) -> Weights:
    weights = eagle3_weights()
    weights["d2t"][index] = offset
    return weights


@pytest.mark.parametrize(
    ("weights", "changes", "message"),
    [
        (_with_offset(3, 60), {}, "d2t with different tokens from 0 to 60"),
        (_with_offset(1, int(eagle3_weights()["d2t"][0]) - 1), {}, "d2t with different tokens"),
        (eagle3_weights() | {"t2d": torch.zeros(61).bool()}, {}, "t2d with the tokens of d2t"),
        (eagle3_weights(), {"draft_vocab_size": 24}, "draft_vocab_size 24"),
        (eagle3_weights() | {"fc.weight": torch.ones(32, 80)}, {}, "a different width"),
    ],
)
def test_a_head_that_cannot_be_imported_is_named(
    weights: Weights, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        planned(tmp_path, weights, eagle3_config(**changes))


def test_the_residual_is_normed_by_default_in_the_layout_of_speculators(tmp_path: Path) -> None:
    weights, config = as_speculators(eagle3_weights(), eagle3_config(**IDS))
    assert planned(tmp_path / "a", weights, config).settings.trunk.residual == "normed"
    plan = planned(tmp_path / "b", eagle3_weights(), eagle3_config(**IDS))
    assert plan.settings.trunk.residual == "feature"


def test_layer_indices_are_sorted_and_both_conventions_are_possible(tmp_path: Path) -> None:
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [24, 1, 11]}}
    plan = planned(tmp_path / "a", eagle3_weights(), eagle3_config(**ids))
    assert plan.fusion_layers == ((1, 11, 24), (2, 12, 25))
    found = [settings.trunk.fusion_layers for settings in plan.candidates(28)]
    assert found == [(1, 11, 24), (2, 12, 25)]
    # The last hidden state is the one before the final norm, which is not read.
    assert len(plan.candidates(25)) == 1
    with pytest.raises(CheckpointError, match="hidden states below the last one"):
        plan.candidates(24)
    both = as_speculators(eagle3_weights(), eagle3_config(**IDS))
    assert planned(tmp_path / "b", *both).fusion_layers == (LAYERS,)


def test_without_layer_indices_the_defaults_are_read(tmp_path: Path) -> None:
    plan = planned(tmp_path, eagle3_weights(), eagle3_config())
    (settings,) = plan.candidates(32)
    assert settings.trunk.fusion_layers == (2, 16, 29)
    assert "half of the target's layers" in "\n".join(plan.lines())
    with pytest.raises(CheckpointError, match="hidden states below the last one"):
        plan.candidates(4)


def test_uses_of_norms_that_configs_often_name_wrongly_are_left_to_the_measurement(
    tmp_path: Path,
) -> None:
    weights, model = eagle3_weights(), six_layer_target()
    config = eagle3_config(**IDS, norm_output=True, norm_before_residual=True)
    plan = planned(tmp_path / "a", weights, config)
    report = "\n".join(plan.lines())
    assert "open: experts.output_norm feedback or experts.output_norm head" in report
    assert "open: trunk.residual normed or trunk.residual feature" in report
    record = record_target(TargetAdapter(model).spec, "tiny")
    for settings in plan.candidates(6):
        trunk, experts = settings.trunk, settings.experts
        assert trunk.fusion_layers in (LAYERS, tuple(index + 1 for index in LAYERS))
        published = PublishedEagle3(
            weights,
            model,
            trunk.fusion_layers,
            residual_is_normed=trunk.residual == "normed",
            feeds_normed_back=experts.output_norm == "feedback",
        )
        drafter = build_drafter(settings, record, plan.table.converted()).to(model.dtype)
        assert_drafts_equal(drafter, published, length=4, passes=3)
    assert len(plan.candidates(7)) == 8
    assert distinctions([each.model_dump() for each in plan.candidates(7)])[0] == (
        "experts.output_norm feedback, trunk.fusion_layers [1, 3, 5], trunk.residual normed"
    )
    saved = as_speculators(weights, config, norm_output=True, norm_before_residual=True)
    assert len(planned(tmp_path / "b", *saved).candidates(7)) == 1


def test_indices_of_layers_are_as_many_as_the_states(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="with 3 different indices"):
        planned(tmp_path, eagle3_weights(), eagle3_config(layer_ids=[1, 2]))
