"""The learning curve shows whether more data would help: nested fractions, equal steps."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.training import tiny_run
from transformers import AutoTokenizer
from typer.testing import CliRunner, Result

from jakiro.cli import app
from jakiro.errors import ConfigError
from jakiro.utils.settings import dump_settings
from training.data.held_out import split_validation
from training.data.token_store import open_tokens
from training.studies.learning_curve import LearningCurve, Point, verdict
from training.train import train


def test_smaller_fractions_are_subsets_of_larger_fractions(workshop: Path) -> None:
    settings = tiny_run(workshop)
    tokenizer = AutoTokenizer.from_pretrained(workshop / "target")
    store = open_tokens(settings.data.paths, tokenizer, settings.data.cache_folder)
    (small, held), (half, _), (whole, same) = (
        split_validation(store, 2, fraction) for fraction in (0.2, 0.5, 1.0)
    )
    assert set(small) < set(half) < set(whole)
    assert (len(small), len(half), len(whole)) == (1, 3, 6)
    assert held.tolist() == same.tolist()
    assert not set(held) & set(whole)
    assert split_validation(store, 0, 0.5)[1].tolist() == []
    assert len(split_validation(store, 0, 0.5)[0]) == 4


def test_a_curve_is_trained_fraction_by_fraction_and_reported(workshop: Path) -> None:
    settings = tiny_run(workshop, steps=3, evaluation={"num_prompts": 1})
    curve = LearningCurve(settings, [0.5, 1.0])
    assert [run.is_finished for run in curve.runs] == [False, False]
    for run in curve.runs:
        assert run.settings.steps == settings.steps
        train(run.settings)
    *lines, sentence = curve.finish()
    assert len(lines) == 2
    assert lines[0].startswith("0.5 of the documents")
    folder = settings.run_folder / "learning-curve"
    points = json.loads((folder / "learning-curve.json").read_text())["points"]
    assert points[0]["tokens"] < points[1]["tokens"]
    assert points[0]["epochs"] > points[1]["epochs"]
    assert points[1]["tau"] >= 1
    assert (folder / "learning-curve.png").stat().st_size > 5000
    assert "tokens" in sentence
    assert all(run.is_finished for run in LearningCurve(settings, [0.5, 1.0]).runs)


def test_a_curve_needs_a_number_of_steps(workshop: Path) -> None:
    settings = tiny_run(workshop, steps=None, epochs=2)
    with pytest.raises(ConfigError, match=r"same number of steps.*epochs of 2"):
        LearningCurve(settings, [0.5, 1.0])


@pytest.mark.parametrize("limit", [{"minutes": 1}, {"evaluation": {"every": 2, "patience": 1}}])
def test_a_curve_has_no_runs_that_end_early(workshop: Path, limit: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"same number of steps.*patience=null"):
        LearningCurve(tiny_run(workshop, **limit), [0.5, 1.0])


def point(fraction: float, agreement: float, epochs: float = 4.0, positions: int = 10_000) -> Point:
    return Point(fraction, int(1e6 * fraction), epochs, agreement, 1.0, positions, None)


def test_the_sentence_follows_from_the_two_largest_fractions() -> None:
    gained = verdict([point(0.25, 0.1), point(0.5, 0.5), point(1.0, 0.55)])
    assert "500,000 to 1,000,000" in gained
    assert "+5.0 points per doubling" in gained
    assert gained.endswith("more data of this kind would help.")
    level = verdict([point(0.25, 0.1), point(0.5, 0.550), point(1.0, 0.551)])
    assert level.endswith("more data would hardly help.")
    fallen = verdict([point(0.5, 0.6), point(1.0, 0.5)])
    assert "agreement fell" in fallen
    few = verdict([point(0.5, 0.5, positions=50), point(1.0, 0.55, positions=50)])
    assert "within noise" in few
    unread = verdict([point(0.5, 0.5, epochs=0.8), point(1.0, 0.6, epochs=0.4)])
    assert "increase `steps` first" in unread


def test_target_states_on_disk_are_refused_because_every_fraction_has_its_own_sequences(
    workshop: Path,
) -> None:
    states = {"source": "offline", "folder": str(workshop / "states")}
    with pytest.raises(ConfigError, match=r"target_states\.source=online"):
        LearningCurve(tiny_run(workshop, target_states=states), [0.5, 1.0])


def test_a_curve_needs_validation_data(workshop: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.validation_size"):
        LearningCurve(tiny_run(workshop, data={"validation_size": 0}), [0.5, 1.0])


def test_fractions_with_the_same_documents_say_nothing() -> None:
    assert "the same documents" in verdict([point(1.0, 0.5), point(1.0, 0.5)])


def test_a_finished_run_with_other_settings_is_refused(workshop: Path) -> None:
    def learn(seed: int) -> Result:
        config = workshop / "curve.yaml"
        run = tiny_run(workshop, steps=2, seed=seed, evaluation={"num_prompts": 0})
        config.write_text(dump_settings(run))
        words = ["train", "--config", str(config), "--learning-curve", "0.5,1"]
        return CliRunner().invoke(app, words)

    assert learn(0).exit_code == 0
    assert learn(0).exit_code == 0
    other = learn(1)
    assert isinstance(other.exception, ConfigError)
    assert "seed differs" in str(other.exception)
