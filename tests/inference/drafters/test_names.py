"""Names of drafters: their parts, and the refusal of those that certainly do not exist."""

import json
from pathlib import Path

import pytest

from inference.drafters.names import (
    PairName,
    UntrainedName,
    refuse_missing_drafters,
    refuse_missing_parts,
)
from jakiro.errors import ConfigError, JakiroError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a table, a model, and a drafter of this model."""
    for name in ("model", "drafter"):
        (tmp_path / name).mkdir()
    (tmp_path / "table").touch()
    config = {"target": {"name_or_path": "./model"}}
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_name_has_up_to_two_drafters() -> None:
    assert UntrainedName.parse("aded=table") == UntrainedName("aded", "table")
    assert UntrainedName.parse("drafter") is UntrainedName.parse("drafter=aded") is None
    assert PairName.parse("aded=a+lm=b") == PairName("aded=a", "lm=b")
    assert PairName.parse("lookup") is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nope", "cannot load a drafter from ./nope"),
        ("lokup", "use lookup"),
        ("aded=nope", "cannot load trigrams from nope"),
        ("lm=./nope", "cannot load the small language model ./nope"),
        ("lookup+drafter=./nope", "cannot load a drafter from ./nope"),
        ("aded=nope+drafter=drafter", "cannot load trigrams from nope"),
    ],
)
def test_a_drafter_that_does_not_exist_is_refused(name: str, message: str) -> None:
    with pytest.raises(JakiroError, match=message):
        refuse_missing_drafters(name)


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("lookup", "lookup"),
        ("drafter=drafter", "drafter"),
        ("aded=table+lm=model", "lm=model"),
        ("lookup+drafter=drafter", "drafter"),
    ],
)
def test_drafters_that_exist_are_accepted(name: str, first: str) -> None:
    assert refuse_missing_drafters(name) == first
    refuse_missing_parts(name, "model")


def test_a_target_must_be_given_or_named(folder: Path) -> None:
    refuse_missing_parts("drafter", None)
    with pytest.raises(ConfigError, match="a target must be given"):
        refuse_missing_parts("lookup", None)
    (folder / "model").rmdir()
    with pytest.raises(JakiroError, match=r"cannot load the target \./model"):
        refuse_missing_parts("drafter", None)
    (folder / "drafter" / "config.json").write_text("[]")  # loading explains what is wrong
    refuse_missing_parts("drafter", None)
