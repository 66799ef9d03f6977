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


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (
            {"trunk": MOA | {"fusion_layers": [1]}},
            "fusion_layers can be set only if the trunk reads features",
        ),
        (
            {"trunk": {"num_heads": 3, "num_kv_heads": 2}},
            "num_heads must be a multiple of num_kv_heads",
        ),
        (
            {"tail_layers": 1},
            "tail_layers requires experts.combine=sum, and schedule.parallel_levels=0 or schedule",
        ),
        ({"draft_vocab_size": 0}, "'draft_vocab_size'"),
    ],
)
def test_impossible_drafters_are_refused(drafter: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate_settings(DrafterSettings, drafter, source="the test")


@pytest.fixture(scope="module")
def record() -> TargetRecord:
    return record_target(TargetAdapter(tiny_llama()).spec, "tiny")


TAIL = {"combine": "sum", "parallel_levels": 0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (tiny_settings(trunk=FEEDBACK | {"fusion_layers": (4,)}), r"trunk\.fusion_layers .* to 3"),
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


def _run(**changes: Any) -> TrainSettings:
    return tiny_run(Path(), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": {"warmup_steps": 11}}, r"warmup_steps \(11\) no larger than steps \(10\)"),
        (
            {"drafter": {"trunk": FEEDBACK}, "batch": {"anchors": "blocks"}},
            r"the default of batch\.anchors when",
        ),
        ({"engine": {"offload_optimizer": True}}, r"zero_stage 1, 2 or 3 when"),
        ({"engine": {"offload_parameters": True, "zero_stage": 2}}, r"zero_stage 3 when"),
        ({"optimizer": {"kind": "muon"}, "engine": {"zero_stage": 2}}, r"zero_stage 0 and"),
        ({"optimizer": {"kind": "muon", "weight_decay": 0.1}}, r"optimizer\.weight_decay 0"),
        ({"drafter": {"experts": {"output_norm": "head"}}}, r"feature_weight 0 and"),
        (
            {"drafter": {"experts": {"head": "own"}}, "engine": {"zero_stage": 3}},
            r"zero_stage at most 2 when drafter\.experts\.head is own",
        ),
        (
            {
                "drafter": {"experts": {"combine": "sum"}},
                "objective": {"multiple_choice_weight": 0.5},
            },
            r"multiple_choice_weight 0 when",
        ),
        ({"lora": {}}, r"initialize\.drafter when lora is set"),
        (
            {"lora": {}, "initialize": {"drafter": "x"}, "engine": {"zero_stage": 3}},
            r"zero_stage at most 2 when lora is set",
        ),
    ],
)
def test_settings_of_a_run_that_contradict_each_other_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        _run(**changes)


def _fed_back(**changes: Any) -> TrainSettings:
    values = _run(**changes).model_dump()
    values["drafter"] = {"trunk": FEEDBACK | {"ttt_steps": 3}}
    return validate_settings(TrainSettings, values, source="the test")


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
