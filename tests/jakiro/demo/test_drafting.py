"""The demo's drafter fits the target's size, and different settings have different folders."""

from pathlib import Path
from typing import Any

import pytest
from helpers.models import tiny_drafter, tiny_llama
from helpers.tokenizers import tiny_tokenizer
from rich.progress import Progress

from jakiro.demo import drafting
from jakiro.demo.presets import PRESETS, DrafterRecipe
from jakiro.target.adapter import TargetAdapter
from training.config import TrainSettings

RECIPE = DrafterRecipe(steps=7, batch_size=3, learning_rate=0.5)


@pytest.fixture
def settings_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A function that returns the settings of a training run, without training."""
    found: list[TrainSettings] = []

    def keep(settings: TrainSettings, **_: Any) -> Path:
        found.append(settings)
        return settings.run_folder

    def settings_for(model: Any, recipe: DrafterRecipe = RECIPE, name: str = "a") -> TrainSettings:
        texts, tokenizer = tmp_path / "texts.jsonl", tiny_tokenizer()
        progress = Progress(disable=True)
        places = (name, texts, tmp_path)
        folder = drafting.train_drafter(recipe, *places, model, tokenizer, "cpu", progress)
        assert folder == found[-1].run_folder
        return found[-1]

    monkeypatch.setattr(drafting, "train", keep)
    return settings_for


def test_the_settings_follow_the_recipe(settings_for: Any, tmp_path: Path) -> None:
    settings = settings_for(tiny_llama())
    assert (settings.steps, settings.optimizer.warmup_steps) == (7, 7)
    assert settings.batch.global_batch_size == settings.batch.micro_batch_size == 3
    assert settings.optimizer.learning_rate == 0.5
    assert settings.data.paths == (str(tmp_path / "texts.jsonl"),)
    assert settings_for(tiny_llama(), PRESETS["small"].drafter).optimizer.warmup_steps == 30


@pytest.mark.parametrize("preset", ["smoke", "small"])
def test_the_drafter_is_about_as_large_as_a_layer_of_the_target(
    settings_for: Any, preset: str
) -> None:
    recipe = PRESETS[preset].target
    sizes = {"hidden_size": recipe.hidden_size, "intermediate_size": recipe.intermediate_size}
    target = TargetAdapter(tiny_llama(**sizes))
    drafter = tiny_drafter(target, settings_for(target.model).drafter)
    layer = sum(part.numel() for part in target.model.model.layers[0].parameters())
    assert layer / 2 < drafter.num_parameters() < 4 * layer


def test_equal_settings_have_one_folder_and_others_another(settings_for: Any) -> None:
    model = tiny_llama()
    folder = settings_for(model).run_folder
    assert settings_for(model).run_folder == folder
    other = RECIPE.model_copy(update={"steps": 8})
    others = {
        settings_for(model, other).run_folder,
        settings_for(model, name="b").run_folder,
        settings_for(tiny_llama(hidden_size=64)).run_folder,
    }
    assert len({folder, *others}) == 4
