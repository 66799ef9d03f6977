"""Online statistics on the accuracy of two drafters that share trees.

A candidate is *right* if its path from the root equals the tokens that are emitted next. The
candidates of the second, training-free drafter are called *guesses*. The two drafters are also
called the first and the second *source* of candidates.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from pydantic import Field

from inference.draft_tree import ROOT, SequenceTree
from inference.drafters.candidates import Candidates
from inference.drafters.combined.pool import SECOND, Calibration, CandidatePool
from inference.protocol import Budget
from inference.rates import Cells, FadingRates
from inference.trees.limits import MOST_CANDIDATES
from inference.trees.shape import TreeShape
from jakiro.utils.settings import Settings

DOUBT = 6.0  # weight of the prior acceptance rate of 0.5, as a number of decoding steps
MEMORY = 256.0  # number of later trees after which an observation has the weight 1/e


class SampledNodes:
    """Acceptance rates of every node of sampled trees, learned online; thread-safe.

    The nodes of smaller trees share the rates of the corresponding nodes of the largest tree.
    """

    def __init__(self, shape: TreeShape) -> None:
        grid = (shape.depth, max(shape.level_sizes) // shape.children, shape.children)
        self._learned = FadingRates(grid, MEMORY)

    def learn(self, tree: SequenceTree, path: Sequence[int]) -> None:
        accepted, offered = np.zeros((2, *self._learned.shape))
        cells = np.array(tree_cells(tree), np.int64)
        offered[tuple(cells)] = 1.0
        accepted[tuple(cells[:, list(path)])] = 1.0
        self._learned.add(accepted, offered)

    def worth(self, shape: TreeShape) -> float:
        """Return the expected number of accepted nodes of a sampled tree."""
        return float(self._learned.rates(shape_cells(shape), 0.5, DOUBT).sum())

    def clear(self) -> None:
        self._learned.clear()


def sampled_budget(
    sampled: SampledNodes,
    shape: TreeShape,
    budget: Budget,
    gains: Sequence[Sequence[float]],
) -> int:
    """Return how many nodes of a budget to sample; the rest is for deterministic candidates.

    The number does not depend on the tokens that are then sampled, so that acceptance stays exact.

    Args:
        gains: for each sequence, the expected number of tokens that each deterministic candidate
            adds, the most likely candidate first.
    """
    shapes = _cuts(shape, budget)

    def worth(size: int) -> float:
        rest = budget.num_nodes - size
        return len(gains) * sampled.worth(shapes[size]) + sum(sum(own[:rest]) for own in gains)

    return max(sorted(shapes, reverse=True), key=worth, default=0)


@lru_cache(maxsize=256)
def _cuts(shape: TreeShape, budget: Budget) -> Mapping[int, TreeShape]:
    """Return the shapes of all sampled trees within a budget, by their numbers of nodes."""
    cuts = (shape.within(Budget(count, budget.depth)) for count in range(1, budget.num_nodes + 1))
    return {cut.max_nodes: cut for cut in cuts if cut is not None}


def tree_cells(tree: SequenceTree) -> Cells:
    """Return the cell of each node: level, index of its parent among the expanded nodes, rank."""
    expanded: dict[int, dict[int, int]] = {}  # depth -> parent -> index among the expanded nodes
    indices = []
    for parent, depth in zip(tree.parent, tree.depth, strict=True):
        parents = expanded.setdefault(depth, {})
        indices.append(parents.setdefault(parent, len(parents)))
    return (
        np.array(tree.depth, np.int64) - 1,
        np.array(indices, np.int64),
        np.array(tree.rank, np.int64),
    )


@lru_cache(maxsize=1024)
def shape_cells(shape: TreeShape) -> Cells:
    """Return the columns of `tree_cells` for all nodes of a sampled tree of this shape."""
    sizes = shape.level_sizes
    index = np.concatenate([np.arange(size) for size in sizes])
    level = np.repeat(np.arange(shape.depth), sizes)
    return level, index // shape.children, index % shape.children


class CombinedSettings(Settings):
    """Settings for dividing a tree between two drafters, and for learning how reliable they are."""

    # Largest number of candidates in a tree; None for the number of the first drafter.
    num_nodes: int | None = Field(None, ge=1, le=MOST_CANDIDATES)
    # Largest number of the first drafter's candidates that the second drafter continues.
    grafts: int = Field(3, ge=0, le=MOST_CANDIDATES)
    # Largest number of candidates in each such continuation.
    graft_nodes: int = Field(3, ge=1, le=MOST_CANDIDATES)
    trust: float = Field(0.5, gt=0, le=1)  # initial factor of the second drafter's scores
    doubt: float = Field(8.0, gt=0)  # weight of the initial rates, as a number of observations
    # Number of later observations after which an observation has the weight 1/e.
    memory: float = Field(256.0, ge=1)


class Knowledge:
    """Statistics on two sources of candidates, in constant memory; thread-safe."""

    def __init__(self, settings: CombinedSettings, shape: TreeShape) -> None:
        trust = (1.0, settings.trust, 1.0)  # by source
        self.candidates = Calibration(trust, settings.doubt, settings.memory)
        self.sampled = SampledNodes(shape)

    def clear(self) -> None:
        self.candidates.clear()
        self.sampled.clear()

    def learn(self, pool: CandidatePool, emitted: Sequence[int]) -> None:
        """Count which candidates proved right."""
        outcomes = list(pool.outcomes(emitted))
        if not outcomes:
            return
        nodes, is_right = map(np.array, zip(*outcomes, strict=True))
        sources, depths = np.array(pool.sources, np.int64), np.array(pool.depths, np.int64)
        scores = np.array(pool.scores)
        self.candidates.add(sources[nodes], depths[nodes], scores[nodes], is_right)

    def gains(self, guess: Candidates) -> list[float]:
        """Return how many tokens each guess is expected to add, the most likely guess first.

        These are the guesses that only the second drafter proposes.
        """
        rates = self.candidates.rates(
            np.full(len(guess.scores), SECOND), guess.depths, guess.shares
        ).tolist()
        reach = {ROOT: 1.0}
        for node, (rate, parent) in enumerate(zip(rates, guess.parents.tolist(), strict=True)):
            reach[node] = rate * reach[parent]
        return sorted(reach.values(), reverse=True)[1:]
