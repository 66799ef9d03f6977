"""A new version must be better beyond noise, and not at the expense of older traffic."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.adaptation import RECIPE
from helpers.models import tiny_drafter, tiny_llama

from inference.adaptation.lesson import Passage
from inference.benchmark.stats import Floats
from jakiro.target.adapter import TargetAdapter
from training.online import gate
from training.online.gate import FEWEST, Drafters, GateResult, compare_counts, compare_drafters


def _counts(rate: float | Floats, count: int, seed: int) -> Floats:
    random = np.random.default_rng(seed)
    steps = random.binomial(64, 1 / (rate * np.ones(count)))
    return np.array([np.full(count, 64.0), steps.astype(float)])


def _compared(before: Floats, after: Floats) -> GateResult:
    """The result of a first lesson: the drafter in use is the drafter itself."""
    return compare_counts(before, before, after)


@pytest.mark.slow
def test_equal_drafters_pass_in_at_most_three_percent_of_the_comparisons() -> None:
    found = [
        _compared(_counts(2.5, 16, seed), _counts(2.5, 16, seed + 10_000)) for seed in range(1000)
    ]
    passed = sum(result.low > 1 for result in found)
    assert passed <= 1000 * 0.035


def test_a_clearly_better_drafter_passes() -> None:
    found = [
        _compared(_counts(2.0, 16, seed), _counts(2.6, 16, seed + 1000)) for seed in range(100)
    ]
    assert sum(result.is_better(0.02) for result in found) > 95


@pytest.mark.parametrize("count", range(1, FEWEST))
def test_few_prompts_decide_nothing(count: int) -> None:
    assert not _compared(_counts(1.5, count, 0), _counts(4.0, count, 1)).is_better(0.02)


def test_small_losses_on_older_traffic_do_not_add_up() -> None:
    older = np.r_[np.full(16, 2.2), np.full(16, 1.5)]
    better = compare_counts(_counts(2.0, 32, 0), _counts(older * 0.9, 32, 1), _counts(2.6, 32, 2))
    assert better.is_better(0.02)
    rates = np.r_[np.full(16, 1.9), np.full(16, 2.6)]  # better than the one in use, everywhere
    own = _counts(np.r_[np.full(16, 2.3), np.full(16, 1.6)], 32, 3)
    found = compare_counts(own, _counts(rates * 0.9, 32, 1), _counts(rates, 32, 2))
    assert found.low > 1
    assert found.after > found.own
    assert found.older < 0.9
    assert not found.is_better(0.02)
    # A version must not be worse than the drafter itself either.
    found = GateResult(own=2.5, before=2.0, after=2.4, low=1.1, older=1.0, harm=1.1)
    assert not found.is_better(0.02)
    assert found._replace(after=2.5).is_better(0.02)


def test_a_version_that_does_harm_is_found() -> None:
    own, worse, slightly = _counts(2.6, 32, 0), _counts(1.9, 32, 1), _counts(2.1, 32, 2)
    found = compare_counts(own, worse, slightly)
    assert found.is_harmful
    assert not found.is_better(0.02)
    chance = [
        compare_counts(_counts(2.5, 16, seed), _counts(2.5, 16, seed + 10_000), own[:, :16])
        for seed in range(1000)
    ]
    assert sum(result.is_harmful for result in chance) <= 1000 * 0.035


class _Prompts:
    """A decoder that keeps the prompts, and drafts nothing."""

    def __init__(self, found: list[list[int]]) -> None:
        self.found = found

    def generate(self, prompt: list[int], max_new_tokens: int, temperature: float) -> Any:
        self.found.append(prompt)
        return SimpleNamespace(
            stats=SimpleNamespace(decoded=max_new_tokens, target_forwards=max_new_tokens)
        )


def test_prompts_are_decoded_whole_whatever_came_after_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[list[int]] = []
    monkeypatch.setattr(gate, "_decoder", lambda *_: _Prompts(found))
    target = TargetAdapter(tiny_llama())
    held_out = [Passage(token_ids=tuple(range(1, 90)), prompt_length=9)]
    held_out += [Passage(token_ids=tuple(range(1, 50)), prompt_length=40)]
    recipe = RECIPE.model_copy(update={"max_length": 24})
    drafter = tiny_drafter(target)
    compare_drafters(target, Drafters(drafter, drafter, tiny_drafter(target)), held_out, recipe)
    assert found == [list(range(1, 10))] * 2 + [list(range(17, 41))] * 2


def test_a_drafter_is_not_better_than_itself() -> None:
    target = TargetAdapter(tiny_llama())
    drafter = tiny_drafter(target)
    before = {name: weight.clone() for name, weight in drafter.state_dict().items()}
    held_out = [Passage(token_ids=(1, 2, 3, number), prompt_length=3) for number in range(4)]
    found = compare_drafters(target, Drafters(drafter, drafter, drafter), held_out, RECIPE)
    assert found.own == found.before == found.after > 1
    assert found.low == found.older == found.harm == 1
    assert not found.is_better(0.02)
    assert not found.is_harmful
    assert all((weight == before[name]).all() for name, weight in drafter.state_dict().items())
