"""The repository's configs load, list all defaults, and have the documented size."""

from pathlib import Path

import pytest

from jakiro.target.attention_shape import AttentionShape
from jakiro.utils.settings import apply_overrides, load_settings, merge, read_layered_yaml
from training.config import TrainSettings
from training.loop.trainer import build_deepspeed_config

CONFIGS = Path(__file__).parents[2] / "configs"
DRAFTERS = sorted((CONFIGS / "drafters").glob("*.yaml"))
REQUIRED = ["target.name_or_path=any", "data.paths=[any.jsonl]"]


def test_the_base_lists_every_setting_with_its_default() -> None:
    base = load_settings(TrainSettings, CONFIGS / "base.yaml", REQUIRED)
    defaults = TrainSettings.model_validate(
        {"target": {"name_or_path": "any"}, "data": {"paths": ["any.jsonl"]}}
    )
    assert base == defaults
    listed = read_layered_yaml(CONFIGS / "base.yaml")
    listed["target"]["name_or_path"] = listed["data"]["paths"] = None
    full = defaults.model_dump()
    for group, values in full.items():
        assert group in listed
        if isinstance(values, dict):
            assert listed[group].keys() == values.keys()


@pytest.mark.parametrize(
    "path",
    [CONFIGS / "study.yaml", *sorted((CONFIGS / "targets").glob("*.yaml"))],
    ids=lambda path: path.stem,
)
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_config_loads_and_its_batch_can_be_shared_between_processes(
    path: Path, num_processes: int
) -> None:
    settings = load_settings(TrainSettings, path)
    deepspeed = build_deepspeed_config(settings, num_processes)
    assert deepspeed["train_batch_size"] == (
        deepspeed["train_micro_batch_size_per_gpu"]
        * deepspeed["gradient_accumulation_steps"]
        * num_processes
    )


@pytest.mark.parametrize("path", DRAFTERS, ids=lambda path: path.stem)
def test_a_named_drafter_is_the_same_over_any_base(path: Path) -> None:
    first, second = path.read_text().splitlines()[:2]
    assert first.startswith("# ")
    assert "arXiv" in first
    assert not second.startswith("#")
    bases = [CONFIGS / "base.yaml", CONFIGS / "study.yaml"]
    default, studied = (_merged(base, path) for base in bases)
    heads = studied.drafter.trunk.model_dump(include=set(AttentionShape.model_fields))
    trunk = default.drafter.trunk.model_copy(update=heads)
    width = {"intermediate_size": studied.drafter.experts.intermediate_size}
    experts = default.drafter.experts.model_copy(update=width)
    changed = {"trunk": trunk, "experts": experts}
    assert studied.drafter == default.drafter.model_copy(update=changed)
    assert studied.initialize == default.initialize
    assert studied.objective == default.objective


def test_the_defaults_are_the_recommended_drafter() -> None:
    base = CONFIGS / "base.yaml"
    recommended = _merged(base, CONFIGS / "drafters" / "recommended.yaml")
    assert recommended == load_settings(TrainSettings, base, REQUIRED)


def test_the_parallel_levels_of_gumiho_have_the_published_weights() -> None:
    objective = _merged(CONFIGS / "base.yaml", CONFIGS / "drafters" / "gumiho.yaml").objective
    weights = [objective.parallel_weight * objective.level_decay**index for index in range(5)]
    assert weights == pytest.approx([0.8 ** (index + 1) for index in range(5)])


def _merged(base: Path, path: Path) -> TrainSettings:
    layers = merge(read_layered_yaml(base), read_layered_yaml(path))
    return TrainSettings.model_validate(apply_overrides(layers, REQUIRED))
