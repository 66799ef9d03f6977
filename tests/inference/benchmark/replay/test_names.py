"""Drafters and sizes of trees are read as they are written, and mistakes are refused."""

import pytest

from inference.benchmark.replay.document import ReplaySettings
from inference.benchmark.replay.names import Size, trainings_of
from jakiro.errors import ConfigError


def test_paths_may_contain_commas_and_equals_signs() -> None:
    settings = ReplaySettings(drafters=("a=runs/lr=1,levels=2/drafter",), prompts="p.jsonl")
    assert trainings_of(settings) == [("a", "runs/lr=1,levels=2/drafter")]


@pytest.mark.parametrize(
    ("drafters", "message"),
    [
        (("a=x", "a=y", "b=z"), "different numbers of trainings"),
        (("a=x", "a=x"), "given twice"),
        (("runs/drafter",), "expected: NAME=PATH"),
        (("runs/lr=1/drafter",), "expected: NAME=PATH"),
        (("=x",), "expected: NAME=PATH"),
        (("a=",), "expected: NAME=PATH"),
    ],
)
def test_mistaken_drafters_are_refused(drafters: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainings_of(ReplaySettings(drafters=drafters, prompts="p.jsonl"))


def test_sizes_of_trees_are_parsed_and_mistakes_refused() -> None:
    assert Size.parse("candidates=6") == (6, None)
    assert Size.parse("candidates=60,levels=16") == (60, 16)
    for text in (
        *("tree=sampled,candidates=6", "candidates=costs", "levels=2", "candidates=6,levels=0"),
        *("candidates=0", "candidates=5000", "candidates=6,levels=17", "candidates=5,candidates=6"),
    ):
        with pytest.raises(ConfigError, match="expected: candidates=N or candidates=N,levels=M"):
            Size.parse(text)
    with pytest.raises(ValueError, match="a size is given twice"):
        ReplaySettings(drafters=("a=x",), prompts="p.jsonl", trees=("candidates=6",) * 2)
