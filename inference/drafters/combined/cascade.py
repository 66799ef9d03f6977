"""The depth to which the first of two drafters drafts, chosen in each decoding step.

The first drafter is a model, which takes time; the second takes hardly any. A step with the first
drafter, and one without it, are compared by the expected number of tokens per second:

    (1 + G + (1 - p) M) / (seconds to draft, and to verify this tree with the guesses)
    (1 + G) / (seconds to verify the guesses)

Here G is the expected number of correct guesses of the second drafter on the path, p the
probability that the first guess is correct, and M the expected number of correct levels of the
first drafter. These rates are learned online, from earlier tokens only, so acceptance stays exact.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference.draft_tree import ROOT
from inference.drafters.candidates import Candidates
from inference.protocol import Budget
from inference.rates import FadingRates
from inference.trees.shape import TreeShape

STRENGTHS = 12  # number of different strengths of guesses
LEVELS = 16  # number of levels of guesses with a rate of their own
MEMORY = 256.0  # number of later steps after which an observation has the weight 1/e
DOUBT = 4.0  # weight of the prior rates, as a number of decoding steps
PRIOR = 0.5  # prior probability that the next level is correct as well
# number of decoding steps without the first drafter after which it is tried again
LONGEST_REST = 64


class DraftCosts(NamedTuple):
    """Seconds of the parts of a decoding step on this machine."""

    verify: Callable[[int], float]
    draft: Mapping[int, float]


class Cascade:
    """Chooses the depth of the first drafter's trees, from rates that are learned online."""

    def __init__(self, shape: TreeShape, costs: DraftCosts) -> None:
        self.costs = costs
        self._shape = shape
        self._first = FadingRates((shape.depth,), MEMORY)
        self._guesses = FadingRates((STRENGTHS, LEVELS), MEMORY)
        self._rested = 0  # number of steps since the first drafter's drafts were learned from

    def choose(self, guesses: Sequence[Candidates], limit: Budget) -> int:
        """Return the depth of the first drafter's next trees; 0 if it does not draft.

        The first drafter counts as resting until `learn` reports that it drafted: if the depth is
        positive, its trees can still be empty, because the second drafter gets all nodes.
        """
        depth = self._fastest(guesses, limit)
        self._rested += 1
        return depth

    def _fastest(self, guesses: Sequence[Candidates], limit: Budget) -> int:
        right = [self._right(guess) for guess in guesses]
        expected = sum(1 + float(rates.sum()) for rates in right)
        missed = sum(1 - float(rates[:1].sum()) for rates in right)
        size = max(len(guess.token_ids) for guess in guesses)
        costs, count = self.costs, self._shape.depth
        levels = self._first.rates((np.arange(count),), _prior(count), DOUBT).cumsum().tolist()
        speeds = []  # expected tokens per second, by depth
        for more, cut in zip(levels, self._within(limit), strict=False):
            passes = cut.autoregressive_levels
            if passes in costs.draft:
                full = costs.verify(min(limit.num_nodes, cut.max_nodes + size))
                speeds.append((expected + missed * more) / (full + costs.draft[passes]))
        best = max(range(len(speeds)), key=speeds.__getitem__, default=None)
        if best is None:
            return 0
        is_due = self._rested >= LONGEST_REST
        return best + 1 if is_due or speeds[best] > expected / costs.verify(size) else 0

    def learn(self, guess: Candidates, asked: int, reached: int, emitted: Sequence[int]) -> None:
        if asked:
            self._rested = 0
            # A level beyond the emitted tokens is unknown unless an earlier level was wrong.
            count = asked if reached < len(emitted) else min(asked, reached)
            levels = np.arange(self._shape.depth)
            is_right, is_known = levels < reached, levels < count
            self._first.add((is_right & is_known).astype(float), is_known.astype(float))
        depth = min(int(guess.depths.max(initial=0)), LEVELS)
        if depth:
            matched = _matched(guess, emitted)
            count = depth if matched < len(emitted) else min(depth, matched)
            right, tried = np.zeros((2, STRENGTHS, LEVELS))
            tried[_strength(guess), :count] = 1.0
            right[_strength(guess), : min(matched, count)] = 1.0
            self._guesses.add(right, tried)

    def _within(self, limit: Budget) -> list[TreeShape]:
        # Each level of a path needs a node: without room for a path, a sampled tree is empty.
        depths = (limit.num_nodes, limit.depth, self._shape.depth)
        deepest = min(depth for depth in depths if depth is not None)
        budgets = (Budget(limit.num_nodes, depth) for depth in range(1, deepest + 1))
        cuts = (self._shape.within(budget) for budget in budgets)
        return [cut for cut in cuts if cut is not None]

    def _right(self, guess: Candidates) -> NDArray[np.float64]:
        levels = np.arange(min(int(guess.depths.max(initial=0)), LEVELS))
        if not len(levels):
            return np.zeros(0)
        cells = (np.full(len(levels), _strength(guess)), levels)
        return self._guesses.rates(cells, _prior(len(levels)), DOUBT)


def _prior(levels: int) -> NDArray[np.float64]:
    return np.asarray(PRIOR ** (1.0 + np.arange(levels)))


def _strength(guess: Candidates) -> int:
    """Return the strength given by its drafter, or its best score, as a number from 0."""
    if guess.strength is not None:
        return min(guess.strength, STRENGTHS - 1)
    return min(int(float(guess.scores.max()) * STRENGTHS), STRENGTHS - 1)


def _matched(guess: Candidates, emitted: Sequence[int]) -> int:
    """Return how many of the emitted tokens a guess contains as a path from the root."""
    parents, token_ids = guess.parents.tolist(), guess.token_ids.tolist()
    node_of = {pair: node for node, pair in enumerate(zip(parents, token_ids, strict=True))}
    at = ROOT
    for count, token in enumerate(emitted):
        if (at, token) not in node_of:
            return count
        at = node_of[at, token]
    return len(emitted)
