"""What the config of a drafter of EAGLE-3 says, and what it leaves open."""

from pathlib import Path

import pytest
from helpers.eagle3_imports import IDS, LAYERS, planned, six_layer_target
from helpers.imports import assert_drafts_equal
from helpers.published import (
    PublishedEagle3,
    as_speculators,
    eagle3_config,
    eagle3_weights,
)

from jakiro.errors import CheckpointError
from jakiro.exchange.plan import build_drafter, distinctions
from jakiro.target.adapter import TargetAdapter
from jakiro.target.record import record_target


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
