"""Online statistics about two drafters that share trees: which candidates prove right."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from threading import Lock

import numpy as np
from pydantic import Field

from inference.draft_tree import ROOT, SequenceTree
from inference.drafters.candidates import Candidates
from inference.drafters.combined.pool import SECOND, Calibration, CandidatePool
from inference.protocol import Budget
from inference.trees.shape import TreeShape
from jakiro.utils.settings import Settings

NodeKey = tuple[int, int, int]  # depth, parent's index among expanded nodes, rank among siblings

DOUBT = 6.0  # imagined decoding steps, half of which accepted a node
MEMORY = 256.0  # decoding steps after which an observation weighs 1/e


class SampledNodes:
    """Running acceptance rates of every node of sampled trees; thread-safe.

    The nodes of a smaller tree are among those of a larger one. There are as many rates as the
    largest tree has nodes, so that memory is bounded.
    """

    def __init__(self) -> None:
        self._counts: dict[NodeKey, tuple[float, float]] = {}  # accepted, decoding steps
        self._lock = Lock()

    def learn(self, tree: SequenceTree, path: Sequence[int]) -> None:
        """Count which nodes of a sampled tree were accepted.

        Args:
            tree: sampled tree.
            path: accepted nodes.
        """
        accepted = set(path)
        with self._lock:
            for node, key in enumerate(node_keys(tree)):
                wins, steps = self._counts.get(key, (0.0, 0.0))
                fade = 1.0 - 1.0 / MEMORY
                self._counts[key] = (wins * fade + (node in accepted), steps * fade + 1.0)

    def worth(self, shape: TreeShape) -> float:
        """Return the expected number of accepted nodes of a sampled tree."""
        with self._lock:
            counts = [self._counts.get(key, (0.0, 0.0)) for key in all_node_keys(shape)]
        return sum((wins + DOUBT / 2) / (steps + DOUBT) for wins, steps in counts)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._counts.clear()


def sampled_budget(
    sampled: SampledNodes,
    shape: TreeShape,
    budget: Budget,
    gains: Sequence[Sequence[float]],
) -> int:
    """Return how many nodes of a budget to sample; other candidates get the rest.

    The number does not depend on what will be sampled, so that acceptance stays exact.

    Args:
        sampled: acceptance rates of sampled nodes.
        shape: shape of the largest sampled tree.
        budget: budget of the whole tree.
        gains: for each sequence, the expected number of tokens that each other candidate wins, in
            descending order.
    """
    shapes = _cuts(shape, budget)

    def worth(size: int) -> float:
        rest = budget.num_nodes - size
        return len(gains) * sampled.worth(shapes[size]) + sum(sum(own[:rest]) for own in gains)

    return max(sorted(shapes, reverse=True), key=worth, default=0)


@lru_cache(maxsize=256)
def _cuts(shape: TreeShape, budget: Budget) -> Mapping[int, TreeShape]:
    """Return all shapes of smaller sampled trees by their sizes."""
    cuts = (shape.within(Budget(count, budget.depth)) for count in range(1, budget.num_nodes + 1))
    return {cut.max_nodes: cut for cut in cuts if cut is not None}


def node_keys(tree: SequenceTree) -> list[NodeKey]:
    """Return the key of every node of a sampled tree."""
    expanded: dict[int, dict[int, int]] = {}  # depth -> parent -> index among the expanded nodes
    keys = []
    for parent, depth, rank in zip(tree.parent, tree.depth, tree.rank, strict=True):
        parents = expanded.setdefault(depth, {})
        keys.append((depth, parents.setdefault(parent, len(parents)), rank))
    return keys


def all_node_keys(shape: TreeShape) -> list[NodeKey]:
    """Return the keys of all nodes of sampled trees of a shape."""
    return [
        (depth, index // shape.children, index % shape.children)
        for depth, size in enumerate(shape.level_sizes, start=1)
        for index in range(size)
    ]


# A guess is right; or it is right, and no sampled candidate is the same.
MATCH, GAIN = range(2)


class CombinedSettings(Settings):
    """Division of a tree between two drafters, and speed of learning their reliability."""

    num_nodes: int | None = Field(None, ge=1)  # None: as many as trees of the first drafter
    grafts: int = Field(3, ge=0)  # first drafter's candidates that the second continues
    graft_nodes: int = Field(3, ge=1)  # of each such continuation
    trust: float = Field(0.5, gt=0, le=1)  # initial factor of the second drafter's scores
    doubt: float = Field(8.0, gt=0)  # observations that the initial rates count for
    memory: float = Field(256.0, ge=1)  # observations after which one weighs 1/e


class Knowledge:
    """Statistics about two sources of candidates, of fixed size; thread-safe.

    Args:
        settings: trust in the second source, and speed of learning.
    """

    def __init__(self, settings: CombinedSettings) -> None:
        trust, doubt, memory = settings.trust, settings.doubt, settings.memory
        self.candidates = Calibration((1.0, trust, 1.0), doubt, memory)  # by source
        # Of the second source, before anything is sampled: see MATCH and GAIN.
        self.guesses = Calibration((trust, trust / 2), doubt, memory)
        self.sampled = SampledNodes()

    def clear(self) -> None:
        """Forget everything."""
        for statistics in (self.candidates, self.guesses, self.sampled):
            statistics.clear()

    def learn(self, pool: CandidatePool, emitted: Sequence[int]) -> None:
        """Count which candidates proved right.

        Args:
            pool: candidates of both sources.
            emitted: tokens that followed the root.
        """
        _learn(self.candidates, pool, pool.outcomes(emitted))

    def learn_sampled(
        self,
        tree: SequenceTree,
        pool: CandidatePool,
        guess: Candidates,
        path: Sequence[int],
        emitted: Sequence[int],
    ) -> None:
        """Count which sampled candidates were accepted, and which guesses were right.

        Args:
            tree: sampled tree of the first source.
            pool: candidates of both sources.
            guess: candidates of the second source below the root.
            path: accepted nodes of `tree`.
            emitted: tokens that followed the root.
        """
        self.sampled.learn(tree, path)
        alone = CandidatePool(_NOTHING, [])
        alone.graft(ROOT, guess, int(guess.depths.max(initial=0)))
        found = list(alone.outcomes(emitted))
        _learn(self.guesses, alone, found, MATCH)
        gains = []
        for node, is_right in found:
            at = ROOT
            for token in alone.path(node):
                at = pool.node_of[at, token]
            gains.append((node, is_right and pool.sources[at] == SECOND))
        _learn(self.guesses, alone, gains, GAIN)

    def gains(self, guess: Candidates) -> list[float]:
        """Return the expected tokens that guesses win beside sampled candidates, descending."""
        if not len(guess.token_ids):
            return []
        shares, zeros = guess.shares, np.zeros(len(guess.scores), np.int64)
        right = self.guesses.rates(zeros + MATCH, guess.depths, shares)
        wins = self.guesses.rates(zeros + GAIN, guess.depths, shares)
        reach = np.ones(len(shares) + 1)
        for node, parent in enumerate(guess.parents.tolist()):
            reach[node] = right[node] * reach[parent]
        gains = wins * reach[guess.parents]
        return gains[np.argsort(-reach[:-1], kind="stable")].tolist()


_NOTHING = SequenceTree([], [], [], [], [], {}, {}, {})


def _learn(
    calibration: Calibration,
    pool: CandidatePool,
    outcomes: Iterable[tuple[int, bool]],
    source: int | None = None,
) -> None:
    """Add outcomes of candidates to a calibration, by `source` or by their own sources."""
    found = list(outcomes)
    if not found:
        return
    nodes = np.array([node for node, _ in found], np.int64)
    sources = np.array(pool.sources, np.int64)[nodes]
    if source is not None:
        sources = np.full(len(nodes), source, np.int64)
    depths = np.array(pool.depths, np.int64)[nodes]
    is_right = np.array([right for _, right in found], np.bool_)
    calibration.add(sources, depths, np.array(pool.scores)[nodes], is_right)
