"""Exact enumeration: a network that loses replies does not change the distribution of the text."""

import numpy as np
import pytest
from helpers.branching import Chooser
from helpers.quick import mostly_slow
from helpers.remote import VOCAB, RemoteSteps
from helpers.tables import Prefix, Tables, error_of_two_steps, no_processors

from inference.remote.text_state import VerdictLog

EXACT = 1e-9
CLEARLY_WRONG = 0.03
TABLES = Tables(vocab=VOCAB, components=1, seed=3)
SMALL = Tables(vocab=4, components=1, seed=3)


def _error(steps: RemoteSteps, length: int = 2) -> float:
    return error_of_two_steps(steps.tables, no_processors(), steps, length)


def _error_of_first(steps: RemoteSteps) -> float:
    """Return the error of a step that is followed by a step without losses."""
    right = RemoteSteps(steps.tables)

    def step(prefix: Prefix) -> dict[Prefix, float]:
        return steps(prefix) if len(prefix) == 2 else right(prefix)

    return error_of_two_steps(steps.tables, no_processors(), step, length=2)


def _long_replies_are_lost(num_tokens: int) -> float:
    return 0.5 if num_tokens > 1 else 0.1


def test_a_tree_that_travelled_as_integers_keeps_the_target_distribution() -> None:
    assert _error(RemoteSteps(SMALL, children=2, support=3)) < EXACT


@pytest.mark.parametrize("seed", mostly_slow(range(3), quick=[0]))
def test_lost_replies_keep_the_target_distribution_over_two_steps(seed: int) -> None:
    tables = Tables(vocab=4, components=1, seed=seed)
    assert _error(RemoteSteps(tables, _long_replies_are_lost)) < EXACT


# Planted faults: the enumeration must detect each of them.


@pytest.mark.slow
def test_sampling_from_the_distribution_before_it_was_quantized_is_caught() -> None:
    def unquantized(chooser: Chooser, probs: np.ndarray, _: np.ndarray) -> int:
        return chooser.choose((probs / probs.sum()).tolist())

    assert _error(RemoteSteps(TABLES, sample=unquantized)) > 1000 * EXACT


class _TakesNewTrees(VerdictLog):
    """A log that decides the last step again if another tree is submitted for it."""

    def verdict_of(self, step: int, digest: str) -> bytes | None:
        if self.last is not None and digest != self.last.digest:
            self.last, self.next_step = None, step
        return super().verdict_of(step, digest)


@pytest.mark.slow
def test_a_log_that_takes_a_new_tree_is_caught() -> None:
    steps = RemoteSteps(SMALL, _long_replies_are_lost, verdicts=_TakesNewTrees, redrafts=True)
    assert _error_of_first(steps) > CLEARLY_WRONG


class _ForgetsVerdicts(VerdictLog):
    """A log that decides the same tree again, with other random numbers."""

    def verdict_of(self, step: int, digest: str) -> bytes | None:
        if self.last is not None:
            self.last, self.next_step = None, step
        return super().verdict_of(step, digest)


@pytest.mark.slow
def test_a_log_that_decides_a_tree_twice_is_caught() -> None:
    steps = RemoteSteps(TABLES, _long_replies_are_lost, verdicts=_ForgetsVerdicts)
    assert _error_of_first(steps) > CLEARLY_WRONG
