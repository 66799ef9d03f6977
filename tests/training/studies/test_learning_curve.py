"""Whether more data would help: nested shares, equal steps, and a sentence."""

import json
from pathlib import Path

import pytest
from helpers.training import tiny_run
from transformers import AutoTokenizer
from typer.testing import CliRunner, Result

from jakiro.cli import app
from jakiro.errors import ConfigError
from jakiro.utils.settings import dump_settings
from training.data.held_out import split_validation
from training.data.token_store import open_tokens
from training.studies.learning_curve import LearningCurve, Point, parse_fractions, verdict
from training.train import train


def test_smaller_shares_lie_inside_larger_ones(workshop: Path) -> None:
    settings = tiny_run(workshop)
    tokenizer = AutoTokenizer.from_pretrained(workshop / "target")
    store = open_tokens(settings.data.paths, tokenizer, settings.data.cache_folder)
    (small, held), (half, _), (whole, same) = (
        split_validation(store, 2, share) for share in (0.2, 0.5, 1.0)
    )
    assert set(small) < set(half) < set(whole)
    assert (len(small), len(half), len(whole)) == (1, 3, 6)
    assert held.tolist() == same.tolist()
    assert not set(held) & set(whole)
    assert split_validation(store, 0, 0.5)[1].tolist() == []
    assert len(split_validation(store, 0, 0.5)[0]) == 4


def test_a_curve_is_trained_share_by_share_and_told(workshop: Path) -> None:
    settings = tiny_run(workshop, steps=3, evaluation={"num_prompts": 1})
    curve = LearningCurve(settings, parse_fractions("1,0.5"))
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


def point(share: float, agreement: float, epochs: float = 4.0, positions: int = 10_000) -> Point:
    return Point(share, int(1e6 * share), epochs, agreement, 1.0, positions, None)


def test_the_sentence_follows_from_the_two_largest_shares() -> None:
    gained = verdict([point(0.25, 0.1), point(0.5, 0.5), point(1.0, 0.55)])
    assert "500,000 to 1,000,000" in gained
    assert "+5.0 points per doubling" in gained
    assert gained.endswith("more data of this kind would help.")
    level = verdict([point(0.25, 0.1), point(0.5, 0.550), point(1.0, 0.551)])
    assert level.endswith("more data would hardly help at this size.")
    few = verdict([point(0.5, 0.5, positions=50), point(1.0, 0.55, positions=50)])
    assert "within chance" in few
    unread = verdict([point(0.5, 0.5, epochs=0.8), point(1.0, 0.6, epochs=0.4)])
    assert "train for more steps" in unread


@pytest.mark.parametrize("text", ["1", "0,1", "0.5,2", "half,all", "0.5,0.5"])
def test_shares_that_make_no_curve_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no shares"):
        parse_fractions(text)


def test_features_on_disk_make_no_curve_because_every_share_has_rows_of_its_own(
    workshop: Path,
) -> None:
    features = {"source": "offline", "folder": str(workshop / "features")}
    with pytest.raises(ConfigError, match=r"features\.source=online"):
        LearningCurve(tiny_run(workshop, features=features), [0.5, 1.0])


def test_a_curve_needs_something_to_be_measured_on(workshop: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.held_out"):
        LearningCurve(tiny_run(workshop, data={"validation_size": 0}), [0.5, 1.0])


def test_shares_of_the_same_documents_say_nothing() -> None:
    assert "the same documents" in verdict([point(1.0, 0.5), point(1.0, 0.5)])


def test_a_finished_share_is_asked_whether_it_had_these_settings(workshop: Path) -> None:
    def learn(steps: int) -> Result:
        config = workshop / "curve.yaml"
        run = tiny_run(workshop, steps=steps, evaluation={"num_prompts": 0})
        config.write_text(dump_settings(run))
        words = ["train", "--config", str(config), "--learning-curve", "0.5,1"]
        return CliRunner().invoke(app, words)

    assert learn(2).exit_code == 0
    assert learn(2).exit_code == 0
    other = learn(3)
    assert isinstance(other.exception, ConfigError)
    assert "steps differs" in str(other.exception)
