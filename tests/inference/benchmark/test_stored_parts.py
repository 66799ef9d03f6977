"""A stored measurement is continued with the same target, drafters and prompts only."""

from pathlib import Path
from typing import Any

import pytest
from helpers.models import tiny_drafter, tiny_llama

from inference.benchmark.stored_parts import PARTS, continued_parts, parts_of
from inference.drafters.lookup import LookupDrafter
from inference.drafters.trained.drafter import TrainedDrafter
from jakiro.errors import DataError
from jakiro.target.adapter import TargetAdapter

PATH = Path("result.json")
PROMPTS = [[1, 2], [3]]


def _parts(seed: int = 0, prompts: list[list[int]] = PROMPTS, **settings: Any) -> dict[str, str]:
    target = TargetAdapter(tiny_llama())
    trained = TrainedDrafter.for_target(tiny_drafter(target, seed=seed), target)
    drafters = {"own": trained, "lookup": LookupDrafter()}
    return parts_of(target, drafters, prompts, **{"tokens": 8, **settings})


def test_the_same_parts_are_continued() -> None:
    assert continued_parts(PATH, {PARTS: _parts()}, _parts()) == _parts()


def test_other_prompts_and_drafters_are_added() -> None:
    more = _parts(prompts=[*PROMPTS, [4]])
    assert continued_parts(PATH, {PARTS: _parts()}, more) == more
    assert continued_parts(PATH, {PARTS: more}, _parts()) == more


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seed": 1}, "drafter own"),
        ({"prompts": [[1, 2], [5]]}, "prompt 1"),
        ({"tokens": 9}, "tokens"),
    ],
)
def test_a_changed_part_is_named(change: dict[str, Any], name: str) -> None:
    with pytest.raises(DataError, match=rf"expected: {name}: .*; got: {name}: .*; remedy") as found:
        continued_parts(PATH, {PARTS: _parts()}, _parts(**change))
    assert "result.json" in str(found.value)


def test_another_target_is_refused() -> None:
    parts = parts_of(TargetAdapter(tiny_llama(seed=9)), {}, PROMPTS, tokens=8)
    with pytest.raises(DataError, match="target: "):
        continued_parts(PATH, {PARTS: _parts()}, parts)


def test_a_result_that_does_not_name_its_parts_is_refused() -> None:
    with pytest.raises(DataError, match="expected: a result that names its parts"):
        continued_parts(PATH, {"rows": []}, _parts())
