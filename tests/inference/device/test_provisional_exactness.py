"""Exact enumeration: text that was written alone does not change the distribution of the text."""

import numpy as np
import pytest
from helpers.branching import Chooser
from helpers.offline import Noise, OfflineSteps
from helpers.quick import mostly_slow
from helpers.tables import Prefix, Tables, error_of_two_steps, no_processors

from inference.device.offline_text import ProvisionalText, ProvisionalToken
from inference.draft_tree import SequenceTree

EXACT = 1e-9
CLEARLY_WRONG = 0.003


def _error(steps: OfflineSteps, length: int = 3) -> float:
    return error_of_two_steps(steps.tables, no_processors(), steps, length)


def _tables(seed: int) -> Tables:
    return Tables(vocab=4, components=1, seed=seed, sharpness=1.0)


@pytest.mark.parametrize(
    "length", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("seed", range(2))
def test_a_chain_that_was_written_alone_keeps_the_target_distribution(
    length: int, seed: int
) -> None:
    assert _error(OfflineSteps(_tables(seed), length), length=3 + (length > 1)) < EXACT


class _EndsWithAToken(OfflineSteps):
    """Writes nothing after a token, as after one that ends texts."""

    end = 1

    def written_alone(
        self, chooser: Chooser, prefix: Prefix, guess: list[int]
    ) -> tuple[ProvisionalText, Noise]:
        """Return the provisional text up to the token, and the noise of its first written token."""
        text, first = ProvisionalText(guess), Noise()
        for number in range(self.length):
            if self.end in text.token_ids:
                break
            noise = Noise() if number else first
            text.written.append(self.token(chooser, (*prefix, *text.token_ids), noise))
        return text, first


@pytest.mark.parametrize("end", mostly_slow(range(3), quick=[1]))
def test_an_end_of_provisional_text_that_depends_on_earlier_tokens_keeps_the_distribution(
    end: int,
) -> None:
    steps = _EndsWithAToken(_tables(0), 2)
    steps.end = end
    assert _error(steps, length=3) < EXACT


# Planted faults: the enumeration must detect each of them.


class _ChoosesTheBetter(OfflineSteps):
    """Offers the likelier of two tokens as if it were the only one."""

    def token(self, chooser: Chooser, prefix: Prefix, noise: Noise) -> ProvisionalToken:
        """Return the likelier one of two provisional tokens."""
        both = [
            super(_ChoosesTheBetter, self).token(chooser, prefix, own) for own in (noise, Noise())
        ]
        return max(both, key=lambda own: own.weights[own.ids.index(own.token_id)])


class _UsesNoiseAgain(OfflineSteps):
    """Drafts the next tree with the random number of a provisional token that was wrong."""

    def next_tree(self, chooser: Chooser, prefix: Prefix, noise: Noise) -> SequenceTree:
        """Return a tree that is not independent of the last verdict."""
        return self.chain_of(self.token(chooser, prefix, noise))


class _OffersAgain(OfflineSteps):
    """Offers a provisional token again after the target has chosen another one in its place."""

    def rest_of(self, text: ProvisionalText, emitted: list[int]) -> ProvisionalText:
        """Return the first written token where nothing survives."""
        rest = text.after(emitted)
        if rest.written or emitted[:-1] != text.guess:
            return rest
        return ProvisionalText(written=text.written[:1])


class _DropsUnlikelyEnds(OfflineSteps):
    """Withdraws the last provisional token if it is unlikely."""

    def rest_of(self, text: ProvisionalText, emitted: list[int]) -> ProvisionalText:
        """Return what survives, whose length depends on its last token."""
        rest = text.after(emitted)
        if rest.written:
            last = rest.written[-1]
            if last.token_id != last.ids[int(np.argmax(last.weights))]:
                rest.written.pop()
        return rest


class _ForgetsTheDistribution(OfflineSteps):
    """Offers sampled tokens with the distribution of another position."""

    def token(self, chooser: Chooser, prefix: Prefix, noise: Noise) -> ProvisionalToken:
        """Return a token whose weights are reversed."""
        token = super().token(chooser, prefix, noise)
        return token._replace(weights=token.weights[::-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [_UsesNoiseAgain, _OffersAgain, _DropsUnlikelyEnds, _ForgetsTheDistribution],
    ids=lambda fault: fault.__name__,
)
def test_faults_are_caught(fault: type[OfflineSteps]) -> None:
    errors = [_error(fault(_tables(seed), 2)) for seed in range(2)]
    assert max(errors) > CLEARLY_WRONG


@pytest.mark.slow
def test_a_fault_in_a_single_token_is_caught() -> None:
    assert _error(_ChoosesTheBetter(_tables(0), 1)) > CLEARLY_WRONG
