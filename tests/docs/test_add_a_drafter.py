"""The page on adding a drafter: its code runs, and its drafter is lossless."""

import re
from pathlib import Path

import numpy as np
import pytest
from helpers.losslessness import greedy_by_transformers
from helpers.models import tiny_llama

from inference.protocol import AdaptiveDrafter, AdaptiveSession, Drafter, DraftSession

PAGE = (Path(__file__).parents[2] / "docs/developer/add-a-drafter.md").read_text()
PROMPT = [1, 2, 3, 1, 2, 3]


@pytest.fixture(scope="module")
def names() -> dict[str, object]:
    """The names that the blocks define, the check before the drafter that it checks."""
    names: dict[str, object] = {"model": tiny_llama(vocab=11), "tokenizer": None, "prompt": PROMPT}
    drafter, check = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(check, names)
    exec(drafter, names)
    return names


def test_the_drafter_of_the_page_has_at_most_40_lines_and_is_lossless(
    names: dict[str, object],
) -> None:
    assert names["output"].sequences[0].tolist() == greedy_by_transformers(
        names["model"], PROMPT, 32
    )
    assert len(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0].splitlines()) <= 40


def test_the_drafter_of_the_page_repeats_the_last_tokens(names: dict[str, object]) -> None:
    drafter = names["PeriodicDrafter"](period=2, depth=5)
    assert drafter.draft(np.array([4, 1, 2]), 3, 8).token_ids.tolist() == [1, 2, 1]


@pytest.mark.parametrize("cls", [Drafter, DraftSession, AdaptiveSession])
def test_the_page_names_every_abstract_member(cls: type) -> None:
    inherited = set() if cls is not AdaptiveSession else set(DraftSession.__abstractmethods__)
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| `{cls.__name__}`"))
    required = set(re.findall(r"`(\w+)`", line.split("|")[2]))
    assert required == set(cls.__abstractmethods__) - inherited


def test_adaptive_drafters_need_nothing_more_than_drafters() -> None:
    assert AdaptiveDrafter.__abstractmethods__ == Drafter.__abstractmethods__
