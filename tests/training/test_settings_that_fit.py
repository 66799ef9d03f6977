"""Contradictory or impossible settings are refused with a message that names them."""

from pathlib import Path
from typing import Any

import pytest
from helpers.models import tiny_llama, tiny_settings
from helpers.training import tiny_run
from helpers.variants import FEEDBACK

from jakiro.config import JakiroConfig, config_for
from jakiro.drafter_settings import DrafterSettings
from jakiro.errors import ConfigError
from jakiro.target.adapter import TargetAdapter
from jakiro.target.record import TargetRecord, record_target
from jakiro.utils.settings import validate_settings
from training.config import TrainSettings, anchor_rule

MOA = {"kind": "moa"}
FED_BACK = {"trunk": FEEDBACK}
SUMMED = {"experts": {"combine": "sum"}, "schedule": {"parallel_levels": 0}}


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ({"trunk": MOA | {"fusion_layers": [1]}}, "fusion_layers can be set only if trunk.kind is"),
        ({"trunk": MOA | {"ttt_steps": 2}}, "ttt_steps can be set only if trunk.kind is"),
        ({"trunk": MOA | {"input_norms": False}}, "input_norms can be set only if trunk.kind is"),
        (
            {"trunk": MOA | {"input_norms": False, "fusion_layers": [1]}},
            "fusion_layers, input_norms can be set only if",
        ),
        (
            {"trunk": {"num_heads": 3, "num_kv_heads": 2}},
            "num_heads must be a multiple of num_kv_heads",
        ),
        ({"trunk": {"kind": "mlp"}}, r"'trunk\.kind'"),
        ({"trunk": FEEDBACK | {"ttt_steps": 9}}, r"'trunk\.ttt_steps'"),
        (SUMMED | {"tail_layers": -1}, "'tail_layers'"),
        (
            {"tail_layers": 1},
            "tail_layers requires experts.combine=sum, and schedule.parallel_levels=0 or schedule",
        ),
        (SUMMED | {"experts": {}, "tail_layers": 1}, "experts.combine=sum"),
        (
            SUMMED | {"schedule": {"parallel_levels": 1}, "tail_layers": 1},
            "schedule.parallel_levels=0",
        ),
        ({"experts": {"num_experts": 3}}, r"'experts\.num_experts'"),
        ({"schedule": {"parallel_levels": 8}}, r"'schedule\.parallel_levels'"),
        ({"draft_vocab_size": 0}, "'draft_vocab_size'"),
    ],
)
def test_impossible_drafters_are_refused(drafter: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate_settings(DrafterSettings, drafter, source="the test")


def test_possible_drafters_are_not_refused() -> None:
    fused = FEEDBACK | {"fusion_layers": [1], "ttt_steps": 8, "input_norms": False}
    for drafter in ({"trunk": fused}, SUMMED | {"tail_layers": 2}, {"draft_vocab_size": 1}):
        validate_settings(DrafterSettings, drafter, source="the test")


@pytest.fixture(scope="module")
def record() -> TargetRecord:
    return record_target(TargetAdapter(tiny_llama()).spec, "tiny")


TAIL = {"combine": "sum", "parallel_levels": 0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (tiny_settings(trunk=FEEDBACK | {"fusion_layers": (4,)}), r"trunk\.fusion_layers .* to 3"),
        (tiny_settings(trunk=FEEDBACK | {"fusion_layers": (-1,)}), r"trunk\.fusion_layers"),
        (tiny_settings(trunk=FEEDBACK | {"fusion_layers": ()}), "one or more indices"),
        (tiny_settings(layers=()), r"memory\.layers .* one or more"),
        (tiny_settings(draft_vocab_size=62), r"at most 61; got: 62; "),
    ],
)
def test_settings_beyond_the_target_are_refused(
    record: TargetRecord, settings: DrafterSettings, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_for(settings, record)


@pytest.mark.parametrize("tail_layers", [1, 2])
def test_a_tail_leaves_at_least_one_layer_before_it(tail_layers: int) -> None:
    small = TargetAdapter(tiny_llama(num_hidden_layers=tail_layers))
    settings = tiny_settings(**TAIL, tail_layers=tail_layers)
    with pytest.raises(ConfigError, match=f"fewer than the target's {tail_layers} layers"):
        config_for(settings, record_target(small.spec, "tiny"))
    larger = TargetAdapter(tiny_llama(num_hidden_layers=tail_layers + 1))
    config = config_for(settings, record_target(larger.spec, "tiny"))
    assert isinstance(config, JakiroConfig)


@pytest.mark.parametrize(
    "settings", [tiny_settings(trunk=FEEDBACK), tiny_settings(**TAIL, tail_layers=1)]
)
def test_a_target_without_hidden_states_is_refused_with_possible_settings(
    record: TargetRecord, settings: DrafterSettings
) -> None:
    other = record.model_copy(update={"num_hidden_states": None})
    with pytest.raises(ConfigError, match=r"trunk\.kind=moa, .* and drafter\.tail_layers=0"):
        config_for(settings, other)


def _run(**changes: Any) -> TrainSettings:
    return tiny_run(Path(), **changes)


def _fed_back(**changes: Any) -> TrainSettings:
    values = _run(**changes).model_dump()
    values["drafter"] = {"trunk": FEEDBACK | {"ttt_steps": 3}}
    return validate_settings(TrainSettings, values, source="the test")


@pytest.mark.parametrize(
    "batch",
    [
        {"anchor_samples": 2},
        {"anchors": "blocks"},
        {"far_anchors": 0.1},
        {"curriculum_fraction": 0.1},
    ],
)
def test_a_feedback_trunk_has_ttt_steps_instead_of_anchors(batch: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"the default of batch\.{next(iter(batch))} when drafter.trunk.kind is feedback",
    ):
        _fed_back(batch=batch)


@pytest.mark.parametrize(
    ("batch", "key"),
    [
        ({"curriculum_fraction": 1.5}, "curriculum_fraction"),
        ({"anchors": "ttt"}, "anchors"),
        ({"anchor_samples": 9}, "anchor_samples"),
        ({"far_anchors": 1.1}, "far_anchors"),
    ],
)
def test_unusable_settings_of_anchors_are_refused(batch: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"'batch\.{key}"):
        _run(batch=batch)


def test_the_rule_of_anchors_follows_from_the_drafter() -> None:
    kinds = {"drafting": "drafting", "blocks": "blocks", "previous": "previous"}
    for given, kind in kinds.items():
        assert anchor_rule(_run(batch={"anchors": given})).kind == kind
    tail = {"experts": {"combine": "sum"}, "schedule": {"parallel_levels": 0}, "tail_layers": 1}
    assert anchor_rule(_run(drafter=tail)).kind == "blocks"
    assert anchor_rule(_run(drafter=tail, batch={"anchors": "previous"})).kind == "previous"
    rule = anchor_rule(_fed_back())
    assert (rule.kind, rule.num_samples) == ("ttt", 3)
    assert anchor_rule(_run(batch={"anchor_samples": 4})).num_samples == 4
    assert anchor_rule(_run(batch={"far_anchors": 0.1})).far_share == 0.1
