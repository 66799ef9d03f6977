"""Trees that are drafted ahead are those that would have been drafted, and nothing else changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.drafting_ahead import AheadSteps, NumbersOfVerdict, TableRun
from helpers.losslessness import greedy_by_transformers
from helpers.models import tiny_llama
from helpers.quick import mostly_slow
from helpers.tables import Tables, error_of_two_steps, no_processors

from inference import SpeculativeDecoder
from inference.ahead import (
    AheadDecoder,
    AheadRun,
    _Ahead,
)
from inference.draft_tree import DraftTree, SequenceTree
from inference.drafters.aded.drafter import AdedDrafter
from inference.drafters.lookup import LookupDrafter
from inference.drafters.small_lm import SmallLMDrafter, SmallLMSettings
from jakiro.errors import ConfigError

PROMPT = [1, 2, 1, 2, 1]
SETTINGS = SmallLMSettings(depth=2, children=2, breadth=2)
EXACT = 1e-9
TABLES = Tables(vocab=4, components=1, seed=1)


def _models(vocab: int = 7, noise: float = 0.1) -> tuple[Any, Any]:
    """Return a target, and a similar model that drafts for it, both in float64."""
    target, small = tiny_llama(vocab).double(), tiny_llama(vocab).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in small.parameters():
            weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    return target, small


def _decoders(**models: Any) -> tuple[SpeculativeDecoder, AheadDecoder]:
    target, small = _models(**models)
    drafter = SmallLMDrafter(small, target, SETTINGS)
    usual = SpeculativeDecoder(target, drafter, tree="fixed")
    return usual, AheadDecoder(target, drafter, tree="fixed")


def test_greedy_tokens_equal_those_of_transformers() -> None:
    usual, ahead = _decoders()
    output = ahead.generate(PROMPT, max_new_tokens=60, temperature=0)
    alone = usual.generate(PROMPT, max_new_tokens=60, temperature=0)
    expected = greedy_by_transformers(ahead.target.model, PROMPT, 60)
    assert output.sequences[0].tolist() == expected
    assert output.depths == alone.depths
    assert 0 < ahead.num_right < ahead.num_guesses


@pytest.mark.parametrize("temperature", [0.7, pytest.param(1.5, marks=pytest.mark.slow)])
def test_sampled_tokens_are_the_same_as_without_drafting_ahead(temperature: float) -> None:
    usual, ahead = _decoders()
    for seed in range(4):
        options = {"max_new_tokens": 24, "temperature": temperature, "seed": seed}
        output, alone = ahead.generate(PROMPT, **options), usual.generate(PROMPT, **options)
        assert (output.new_token_ids, output.depths) == (alone.new_token_ids, alone.depths)
    assert 0 < ahead.num_right < ahead.num_guesses


def test_several_sequences_are_decoded_as_usual() -> None:
    usual, ahead = _decoders()
    options: dict[str, Any] = {"max_new_tokens": 20, "temperature": 0.9, "seed": 3}
    prompts = [PROMPT, [3, 4]]
    found = [own.new_token_ids for own in ahead.generate_batch(prompts, **options)]
    assert found == [own.new_token_ids for own in usual.generate_batch(prompts, **options)]


def test_a_prompt_that_joins_gets_its_own_tokens() -> None:
    usual, ahead = _decoders()
    run = ahead.start([PROMPT], max_new_tokens=30, temperature=0.9, seed=3)
    steps = iter(run)
    for _ in range(4):
        next(steps)
    ahead.admit(run, [[3, 4]], max_new_tokens=30, temperature=0.9, seed=[5])
    run.finish()
    for state, prompt, seed in zip(run.sequences, (PROMPT, [3, 4]), (3, 5), strict=True):
        alone = usual.generate(prompt, max_new_tokens=30, temperature=0.9, seed=seed)
        assert state.new_token_ids == alone.new_token_ids


# Exact enumeration of two steps: trees that were drafted ahead keep the target's distribution.


def _error(steps: AheadSteps) -> float:
    return error_of_two_steps(steps.tables, no_processors(), steps, length=4)


@pytest.mark.parametrize("seed", mostly_slow(range(4), quick=[1]))
def test_kept_trees_keep_the_target_distribution(seed: int) -> None:
    steps = AheadSteps(Tables(vocab=4, components=1, seed=seed))
    assert _error(steps) < EXACT
    assert 0 < steps.decoder.num_right < steps.decoder.num_guesses


@pytest.mark.slow
def test_kept_trees_of_many_orders_keep_the_target_distribution() -> None:
    assert _error(AheadSteps(TABLES, support=3)) < EXACT


# Other guesses, also wrong ones: the distribution is the same.

Plant = Callable[[pytest.MonkeyPatch], None]


def _a_wrong_guess_stays(patch: pytest.MonkeyPatch) -> None:
    original = AheadRun._forget

    def stays(self: AheadRun) -> None:
        own = self._ahead
        if own is not None and len(own.token_ids) == len(self.live[0].token_ids):
            self._ahead = None
        original(self)

    patch.setattr(AheadRun, "_forget", stays)


def _a_tree_is_kept_after_another_outcome(patch: pytest.MonkeyPatch) -> None:
    original = AheadRun._proposed

    def keeps(self: AheadRun, token_ids: Any, *others: Any) -> DraftTree:
        own = self._ahead
        if own is not None and len(own.token_ids) == len(token_ids[0]):
            self._ahead = _Ahead(list(token_ids[0]), own.known, own.tree)
        return original(self, token_ids, *others)

    patch.setattr(AheadRun, "_proposed", keeps)


def _a_guess_knows_the_outcome(patch: pytest.MonkeyPatch) -> None:
    original = AheadRun._drafted

    def knows(self: TableRun, tree: SequenceTree) -> Any:
        path, token = self.outcome(tree)
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(SequenceTree, "best_path", lambda _: path)
            inner.setattr("inference.ahead._likeliest", lambda _: token)
            return original(self, tree)

    patch.setattr(AheadRun, "_drafted", knows)


WRONG_TREES = [_a_wrong_guess_stays, _a_tree_is_kept_after_another_outcome]


def _name(plant: Plant) -> str:
    return plant.__name__.strip("_")


def test_a_tree_drafted_with_the_numbers_of_the_verdict_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("inference.ahead.StepRandom", NumbersOfVerdict)
    assert _error(AheadSteps(TABLES)) > 1e-3


# A tree may be below any guess: only what was sampled must not depend on how it is accepted.
@pytest.mark.parametrize("plant", [*WRONG_TREES, _a_guess_knows_the_outcome], ids=_name)
def test_the_choice_of_the_guess_does_not_change_the_distribution(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    steps = AheadSteps(TABLES)
    assert _error(steps) < EXACT
    assert steps.decoder.num_right > 0


@pytest.mark.parametrize(
    ("drafter", "options", "message"),
    [
        (None, {}, "does not learn"),
        (AdedDrafter(), {}, "does not learn"),
        (LookupDrafter(), {"tree": "auto"}, 'tree="fixed"'),
        (LookupDrafter(), {"captured": True}, "captured=False"),
    ],
)
def test_what_cannot_be_drafted_ahead_is_refused(
    drafter: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        AheadDecoder(tiny_llama(), drafter, **{"tree": "fixed", **options})
