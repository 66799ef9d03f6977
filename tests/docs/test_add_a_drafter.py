"""The page on adding a drafter: its drafter runs, and the lists of members are complete."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.losslessness import greedy_by_transformers
from helpers.models import tiny_llama

from inference.protocol import AdaptiveDrafter, AdaptiveSession, Drafter, DraftSession

PAGE = (Path(__file__).parents[2] / "docs/developer/add-a-drafter.md").read_text()
[CODE] = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names that the page's code defines."""
    folder = tmp_path_factory.mktemp("target")
    tiny_llama(vocab=11).save_pretrained(folder)
    names: dict[str, Any] = {"target_path": str(folder)}
    exec(CODE, names)
    return names


def test_the_drafter_of_the_page_is_lossless(names: dict[str, Any]) -> None:
    expected = greedy_by_transformers(names["model"], names["prompt"], 32)
    assert names["output"].sequences[0].tolist() == expected


def test_the_code_of_the_page_has_at_most_40_lines() -> None:
    assert len(CODE.splitlines()) <= 40


def test_the_drafter_of_the_page_repeats_the_last_tokens(names: dict[str, Any]) -> None:
    drafter = names["PeriodicDrafter"](period=2, depth=5)
    assert drafter.draft(np.array([4, 1, 2]), 3, 8).token_ids.tolist() == [1, 2, 1]


@pytest.mark.parametrize("cls", [Drafter, DraftSession, AdaptiveSession])
def test_the_page_names_every_abstract_member(cls: type) -> None:
    inherited = DraftSession.__abstractmethods__ if cls is AdaptiveSession else frozenset()
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| `{cls.__name__}`"))
    required = set(re.findall(r"`(\w+)`", line.split("|")[2]))
    assert required == cls.__abstractmethods__ - inherited


def test_adaptive_drafters_must_define_nothing_more_than_drafters() -> None:
    assert AdaptiveDrafter.__abstractmethods__ == Drafter.__abstractmethods__
