"""The demo passes results from part to part, measures trees once, and detects wrong tokens."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.models import tiny_drafter, tiny_llama
from helpers.tokenizers import tiny_tokenizer
from rich.progress import Progress

from inference.autotune.costs import Costs
from inference.autotune.search import PlanChoice, Rated
from inference.trees.shape import TreeShape
from jakiro.demo import pipeline
from jakiro.demo import pipeline as drafting
from jakiro.demo.corpus import Corpus
from jakiro.demo.presets import PRESETS, DrafterRecipe
from jakiro.demo.prompts import Prompt
from jakiro.errors import JakiroError
from jakiro.target.adapter import TargetAdapter
from training.config import TrainSettings

RATED = Rated(
    shape=TreeShape(autoregressive_levels=1, parallel_levels=1, num_nodes=4), tau=2.0, speedup=1.0
)
CHOICE = PlanChoice(
    costs=Costs(verify={0: 1.0, 4: 1.5}, draft={1: 0.5}), greedy=RATED, sampling=RATED
)
RECIPE = DrafterRecipe(steps=7, batch_size=3, learning_rate=0.5)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The number of calls of each slow part, all of which are replaced by fast functions."""
    counts: Counter[str] = Counter()

    def replace(name: str, part: Callable[..., Any]) -> None:
        def counted(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return part(*args, **options)

        monkeypatch.setattr(pipeline, name, counted)

    def train_drafter(recipe: Any, target: str, texts: Path, folder: Path, *more: Any) -> Path:
        assert texts.name == "texts.jsonl"
        tiny_drafter(TargetAdapter(more[0])).save_pretrained(folder / "drafter")
        return folder / "drafter"

    def prompts_from_split(*_: Any, count: int) -> tuple[Prompt, ...]:
        return tuple(Prompt(f"def main_{number}(", "main.py") for number in range(count))

    replace("load_corpus", lambda: Corpus((), (), (), "0" * 64))
    replace("prompts_from_split", prompts_from_split)
    replace("cached_texts", lambda *args: args[4] / "texts.jsonl")
    replace("train_drafter", train_drafter)
    replace("choose_plan", lambda *_, **__: CHOICE)
    changes = {"num_prompts": 1, "num_tree_prompts": 1, "max_new_tokens": 4}
    tiny = pipeline.PRESETS["smoke"].model_copy(update=changes)
    monkeypatch.setitem(pipeline.PRESETS, "smoke", tiny)
    return counts


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """The folder of a tiny target with its tokenizer."""
    folder = tmp_path / "target"
    tiny_llama(vocab=300).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_the_figures_have_every_method_and_the_trees_which_are_measured_once(
    target: Path, tmp_path: Path, calls: Counter[str], capsys: pytest.CaptureFixture[str]
) -> None:
    documents = []
    for _ in range(2):
        figures = tmp_path / "figures.json"
        pipeline.run_demo("smoke", tmp_path / "cache", "cpu", str(target), figures.write_text)
        documents.append(json.loads(figures.read_text()))
    shown = capsys.readouterr().out
    assert "smoke only checks that everything runs" in shown
    assert "The presets chat and small show speed." in " ".join(shown.split())
    drafter = documents[0]["drafter"]["path"]
    *_, last, generate, bench = shown.splitlines()
    assert last == f"Drafter: {drafter}"
    assert generate == f"  jakiro generate {drafter} 'def main('"
    assert bench.startswith(f"  jakiro bench --target {target} --method transformers ")
    assert f" --method drafter={drafter} --prompts " in bench
    first, second = documents
    assert calls["choose_plan"] == 1
    assert calls["train_drafter"] == 2  # it looks into the cache itself
    assert first["drafter"] == second["drafter"]
    assert first["drafter"]["trees"] == CHOICE.plan.model_dump()
    assert (first["target"]["path"], first["target"]["validation_loss"]) == (str(target), None)
    measured = {(row["method"], row["temperature"]) for row in first["results"]}
    assert {method for method, _ in measured} == {
        *("transformers", "transformers-lookup", "autoregressive", "jakiro")
    }
    assert len(measured) == 4 * len(pipeline.TEMPERATURES)


def test_wrong_tokens_are_an_error_after_the_figures(
    target: Path,
    tmp_path: Path,
    calls: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = pipeline.results_of

    def wrong(*args: Any) -> list[dict[str, Any]]:
        *others, last = original(*args)
        return [*others, last | {"identical_to_target": False}]

    monkeypatch.setattr(pipeline, "results_of", wrong)
    figures = tmp_path / "figures.json"
    with pytest.raises(JakiroError, match="tokens differ from those of transformers"):
        pipeline.run_demo("smoke", tmp_path / "cache", "cpu", str(target), figures.write_text)
    assert json.loads(figures.read_text())["results"]


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
