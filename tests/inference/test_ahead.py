"""Trees that are drafted ahead are those that would have been drafted, and nothing else changes."""

from typing import Any

import pytest
import torch
from helpers.losslessness import assert_follows_distribution, greedy_by_transformers
from helpers.models import tiny_llama

from inference import SpeculativeDecoder
from inference.ahead import AheadDecoder, AheadRun, _Ahead, expected_gain
from inference.draft_tree import DraftTree
from inference.drafters.aded.drafter import AdedDrafter
from inference.drafters.lookup import LookupDrafter
from inference.drafters.small_lm import SmallLMDrafter, SmallLMSettings
from jakiro.errors import ConfigError

PROMPT = [1, 2, 1, 2, 1]
RUNNERS = ["inline", "thread"]
SETTINGS = SmallLMSettings(depth=2, children=2, breadth=2)


def _models(vocab: int = 7, noise: float = 0.1) -> tuple[Any, Any]:
    """Return a target, and a similar model that drafts for it, both in float64."""
    target, small = tiny_llama(vocab).double(), tiny_llama(vocab).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in small.parameters():
            weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    return target, small


def _decoders(runner: str, **models: Any) -> tuple[SpeculativeDecoder, AheadDecoder]:
    target, small = _models(**models)
    drafter = SmallLMDrafter(small, target, SETTINGS)
    usual = SpeculativeDecoder(target, drafter, tree="fixed")
    return usual, AheadDecoder(target, drafter, tree="fixed", runner=runner)


@pytest.mark.parametrize("runner", RUNNERS)
def test_greedy_tokens_equal_those_of_transformers(runner: str) -> None:
    usual, ahead = _decoders(runner)
    output = ahead.generate(PROMPT, max_new_tokens=60, temperature=0)
    alone = usual.generate(PROMPT, max_new_tokens=60, temperature=0)
    expected = greedy_by_transformers(ahead.target.model, PROMPT, 60)
    assert output.sequences[0].tolist() == expected
    assert output.depths == alone.depths
    assert 0 < ahead.num_right < ahead.num_guesses


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("temperature", [0.7, pytest.param(1.5, marks=pytest.mark.slow)])
def test_sampled_tokens_are_the_same_as_without_drafting_ahead(
    runner: str, temperature: float
) -> None:
    usual, ahead = _decoders(runner)
    for seed in range(4):
        options = {"max_new_tokens": 24, "temperature": temperature, "seed": seed}
        output, alone = ahead.generate(PROMPT, **options), usual.generate(PROMPT, **options)
        assert (output.new_token_ids, output.depths) == (alone.new_token_ids, alone.depths)
    assert 0 < ahead.num_right < ahead.num_guesses


def test_a_model_that_drafts_for_itself_guesses_right() -> None:
    _, ahead = _decoders("inline", noise=0.0)
    ahead.generate(PROMPT, max_new_tokens=40, temperature=0)
    assert ahead.num_right >= ahead.num_guesses - 1  # the last step has no successor


@pytest.mark.slow
def test_sampled_text_follows_the_targets_distribution() -> None:
    _, ahead = _decoders("thread", vocab=3)
    options: dict[str, Any] = {"samples": 1000, "batch": 1, "length": 6}
    assert_follows_distribution(ahead, ahead.target.model, 0.9, **options)
    assert ahead.num_right > 100


def test_several_sequences_are_decoded_as_usual() -> None:
    usual, ahead = _decoders("inline")
    options: dict[str, Any] = {"max_new_tokens": 20, "temperature": 0.9, "seed": 3}
    prompts = [PROMPT, [3, 4]]
    found = [own.new_token_ids for own in ahead.generate_batch(prompts, **options)]
    assert found == [own.new_token_ids for own in usual.generate_batch(prompts, **options)]


def test_a_prompt_that_joins_gets_its_own_tokens() -> None:
    usual, ahead = _decoders("inline")
    run = ahead.start([PROMPT], max_new_tokens=30, temperature=0.9, seed=3)
    steps = iter(run)
    for _ in range(4):
        next(steps)
    ahead.admit(run, [[3, 4]], max_new_tokens=30, temperature=0.9, seed=[5])
    run.finish()
    for state, prompt, seed in zip(run.sequences, (PROMPT, [3, 4]), (3, 5), strict=True):
        alone = usual.generate(prompt, max_new_tokens=30, temperature=0.9, seed=seed)
        assert state.new_token_ids == alone.new_token_ids


def test_text_that_is_looked_up_is_drafted_ahead_too() -> None:
    target, _ = _models()
    ahead = AheadDecoder(target, LookupDrafter(), tree="fixed", runner="inline")
    output = ahead.generate(PROMPT, max_new_tokens=40, temperature=0)
    assert output.sequences[0].tolist() == greedy_by_transformers(target, PROMPT, 40)


# Planted faults: other tokens, or another distribution.


def _sampled(decoder: SpeculativeDecoder) -> list[list[int]]:
    options: dict[str, Any] = {"max_new_tokens": 20, "temperature": 1.0}
    return [decoder.generate(PROMPT, seed=seed, **options).new_token_ids for seed in range(6)]


def test_a_wrong_guess_that_stays_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual, ahead = _decoders("inline")
    expected = _sampled(usual)

    original = AheadRun._forget

    def stays(self: AheadRun) -> None:
        own = self._ahead
        if own is not None and len(own.token_ids) == len(self.live[0].token_ids):
            self._ahead = None
        original(self)

    monkeypatch.setattr(AheadRun, "_forget", stays)
    assert _sampled(ahead) != expected


def test_a_tree_that_is_kept_after_another_outcome_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual, ahead = _decoders("inline")
    expected, original = _sampled(usual), AheadRun._proposed

    def keeps(self: AheadRun, token_ids: Any, *others: Any) -> DraftTree:
        own = self._ahead
        if own is not None and len(own.token_ids) == len(token_ids[0]):
            self._ahead = _Ahead(list(token_ids[0]), own.known, own.tree)
        return original(self, token_ids, *others)

    monkeypatch.setattr(AheadRun, "_proposed", keeps)
    assert _sampled(ahead) != expected


@pytest.mark.parametrize(
    ("drafter", "options", "message"),
    [
        (None, {}, "a drafter"),
        (AdedDrafter(), {}, "does not learn"),
        (LookupDrafter(), {"tree": "auto"}, 'tree="fixed"'),
        (LookupDrafter(), {"runner": "stream"}, "a runner of inline, thread"),
        (LookupDrafter(), {"captured": True}, "captured=False"),
    ],
)
def test_what_cannot_be_drafted_ahead_is_refused(
    drafter: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        AheadDecoder(tiny_llama(), drafter, **{"tree": "fixed", **options})


def test_the_expected_gain_follows_the_formula() -> None:
    free = expected_gain(0.31, 0.69, 0.0, beside=1.0, ahead=0.4, right=0.35)
    assert free == pytest.approx(1 / (1 - 0.35 * 0.31))
    assert expected_gain(0.31, 0.69, 0.0, beside=2.0, ahead=0.4, right=0.35) < 0.7
