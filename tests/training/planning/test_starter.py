"""The settings of a first run suit the target, and can be loaded without changes."""

from pathlib import Path

import pytest
import yaml
from helpers.families import tiny_family
from helpers.models import tiny_llama
from helpers.quick import mostly_slow

from jakiro.config import config_for
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter
from jakiro.target.record import record_target
from jakiro.utils.packaged import configs_folder
from jakiro.utils.settings import load_settings
from training.config import TrainSettings
from training.planning.starter import attention_form, fused_states, starter_yaml

DRAFTERS = configs_folder() / "drafters"


def test_the_settings_of_a_first_run_can_be_loaded(tmp_path: Path) -> None:
    target = tmp_path / "A: model"
    tiny_llama().save_pretrained(target)
    path = tmp_path / "my.yaml"
    path.write_text(starter_yaml(str(target), ["a, b.jsonl", "c.jsonl"]))
    settings = load_settings(TrainSettings, path)
    assert settings.target.name_or_path == str(target)
    assert settings.data.paths == ("a, b.jsonl", "c.jsonl")
    assert settings.drafter.trunk.fusion_layers is None
    assert settings.drafter.experts.intermediate_size == tiny_llama().config.intermediate_size
    assert str(settings.run_folder) == "runs/a-model"


@pytest.mark.parametrize(
    "name", mostly_slow(sorted(path.stem for path in DRAFTERS.glob("*.yaml")), quick=["eagle3"])
)
def test_a_drafter_of_a_paper_is_fitted_to_the_target(name: str, tmp_path: Path) -> None:
    model = tiny_family("qwen2", num_hidden_layers=12)
    model.save_pretrained(tmp_path / "target")
    path = tmp_path / "my.yaml"
    path.write_text(starter_yaml(str(tmp_path / "target"), ["a.jsonl"], name))
    settings = load_settings(TrainSettings, path)
    own = yaml.safe_load((DRAFTERS / f"{name}.yaml").read_text())
    for part, values in own["drafter"].items():
        for key, value in values.items() if isinstance(values, dict) else ():
            if key != "fusion_layers":
                assert getattr(getattr(settings.drafter, part), key) == value
    if settings.drafter.trunk.num_layers:
        assert settings.drafter.trunk.attention_bias == "qkv"
    fused = settings.drafter.trunk.fusion_layers
    early = 2 if name == "eagle3-exact" else 1
    assert fused == ((early, 6, 9) if own["drafter"]["trunk"].get("fusion_layers") else None)
    JakiroDrafter(config_for(settings.drafter, record_target(TargetAdapter(model).spec, "x")))


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("llama, grouped heads", {}),
        ("qwen2", {"attention_bias": "qkv"}),
        ("qwen3", {"qk_norm": True}),
        ("olmo2", {}),  # its norms are those of all heads together
    ],
)
def test_the_trunk_has_the_biases_and_norms_of_the_targets_attention(
    family: str, form: dict[str, str | bool], tmp_path: Path
) -> None:
    model = tiny_family(family)
    assert attention_form(TargetAdapter(model)) == form
    model.save_pretrained(tmp_path / "target")
    path = tmp_path / "my.yaml"
    path.write_text(starter_yaml(str(tmp_path / "target"), ["a.jsonl"]))
    trunk = load_settings(TrainSettings, path).drafter.trunk
    assert trunk.attention_bias == form.get("attention_bias", "none")
    assert trunk.qk_norm == ("qk_norm" in form)


@pytest.mark.parametrize(
    ("count", "states"),
    [(31, (3, 15, 27)), (33, (3, 16, 29)), (13, (1, 6, 9)), (6, None), (3, None), (None, None)],
)
def test_an_early_a_middle_and_a_late_state_are_fused(
    count: int | None, states: tuple[int, int, int] | None
) -> None:
    assert fused_states(count) == states
