"""The candidates of two drafters in one tree, and online statistics on the accuracy of both.

A candidate is *right* if its path from the root equals the tokens that are emitted next. The
candidates of the second, training-free drafter are called *guesses*. The two drafters are also
called the first and the second *source* of candidates.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Float64, Int64
from pydantic import Field

from inference.draft_tree import ROOT, SequenceTree
from inference.drafters.candidates import Candidates
from inference.protocol import Budget
from inference.rates import Cells, FadingRates
from inference.trees import MOST_CANDIDATES
from inference.trees.shape import TreeShape
from jakiro.utils.settings import Settings

FIRST, SECOND, BOTH = range(3)  # sources that propose a candidate
TRUST = np.array([1.0, 0.5, 1.0])  # initial factor of a candidate's score, by its source
# Weights of the initial rates of candidates, and of nodes of sampled trees, as numbers of trials.
DOUBT, DOUBT_OF_NODES = 8.0, 6.0
MEMORY = 256.0  # number of later trees after which an observation has the weight 1/e
# Edges of the bins for the conditional probability that a source gives to its candidate.
EDGES = np.array([0.01, 0.03, 0.06, 0.1, 0.17, 0.25, 0.35, 0.5, 0.65, 0.8, 0.92])
DEPTHS = 3  # candidates at this depth and all greater depths share rates


class CombinedSettings(Settings):
    """Settings for dividing a tree between two drafters."""

    # Largest number of candidates in a tree; None for the number of the first drafter.
    num_nodes: int | None = Field(None, ge=1, le=MOST_CANDIDATES)
    # Largest number of the first drafter's candidates that the second drafter continues.
    grafts: int = Field(3, ge=0, le=MOST_CANDIDATES)
    # Largest number of candidates in each such continuation.
    graft_nodes: int = Field(3, ge=1, le=MOST_CANDIDATES)


class Calibration:
    """Acceptance rates by source, depth and score, learned online; thread-safe.

    A rate is the probability that a candidate is right if its parent is right. Without
    observations, the rate is the candidate's score, multiplied by the trust in its source.
    """

    def __init__(self) -> None:
        self._learned = FadingRates((len(TRUST), DEPTHS, len(EDGES) + 1), MEMORY)

    def rates(
        self,
        sources: Int64[np.ndarray, " n"],
        depths: Int64[np.ndarray, " n"],
        scores: Float64[np.ndarray, " n"],
    ) -> Float64[np.ndarray, " n"]:
        prior = TRUST[sources] * scores
        return self._learned.rates(_cells(sources, depths, scores), prior, DOUBT)

    def add(
        self,
        sources: Int64[np.ndarray, " n"],
        depths: Int64[np.ndarray, " n"],
        scores: Float64[np.ndarray, " n"],
        is_right: Bool[np.ndarray, " n"],
    ) -> None:
        cells = _cells(sources, depths, scores)
        right, observed = np.zeros((2, *self._learned.shape))
        np.add.at(right, cells, is_right.astype(float))
        np.add.at(observed, cells, 1.0)
        self._learned.add(right, observed)


def _cells(
    sources: Int64[np.ndarray, " n"],
    depths: Int64[np.ndarray, " n"],
    scores: Float64[np.ndarray, " n"],
) -> Cells:
    return sources, np.minimum(depths, DEPTHS) - 1, np.searchsorted(EDGES, scores)


class CandidatePool:
    """A growing tree: candidates of a first source, with grafted candidates of a second source."""

    def __init__(self, first: SequenceTree, scores: Sequence[float]) -> None:
        self.first = first
        self.token_ids = list(first.token_ids)
        self.parents = list(first.parent)
        self.depths = list(first.depth)
        self.num_first = len(scores)
        above = [0.0 if parent == ROOT else scores[parent] for parent in first.parent]
        self.scores = [  # conditional probabilities according to the source
            float(np.exp(min(0.0, score - parent))) if score > -np.inf else 0.0
            for score, parent in zip(scores, above, strict=True)
        ]
        self.sources = [FIRST] * self.num_first
        self.is_valid = [False] * self.num_first
        self.node_of: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        for parent, siblings in first.children.items():
            for node in siblings:
                self.is_valid[node] = True
                self.node_of[parent, first.token_ids[node]] = node

    def graft(self, anchor: int, guess: Candidates, depth: int) -> list[int]:
        """Add continuations of a node (or ROOT), and return the index of each of their nodes.

        Args:
            depth: largest depth in the tree; deeper nodes are left out and get the index ROOT.
        """
        nodes: list[int] = []
        columns = zip(*(column.tolist() for column in guess[:4]), strict=True)
        for token, parent, below, score in columns:
            level = below + (0 if anchor == ROOT else self.depths[anchor])
            if level > depth:
                nodes.append(ROOT)
                continue
            above = anchor if parent == ROOT else nodes[parent]
            share = score / (1.0 if parent == ROOT else float(guess.scores[parent]))
            nodes.append(self._join(above, token, level, share))
        return nodes

    def follow(self, token_ids: Sequence[int]) -> list[int]:
        nodes: list[int] = []
        at = ROOT
        for token in token_ids:
            found = self.node_of.get((at, token))
            if found is None:
                break
            nodes.append(at := found)
        return nodes

    def path(self, node: int) -> list[int]:
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self.token_ids[node])
            node = self.parents[node]
        return tokens[::-1]

    def values(self, calibration: Calibration) -> Float64[np.ndarray, " nodes"]:
        """Return the probability that each candidate's whole path is right."""
        rates = calibration.rates(
            np.array(self.sources, np.int64), np.array(self.depths, np.int64), np.array(self.scores)
        )
        values = np.zeros(len(rates))
        for node, (parent, rate) in enumerate(zip(self.parents, rates.tolist(), strict=True)):
            if self.is_valid[node]:
                values[node] = rate * (1.0 if parent == ROOT else values[parent])
        return values

    def outcomes(self, emitted: Sequence[int]) -> Iterator[tuple[int, bool]]:
        """Yield each candidate whose parent proved right, and whether it proved right itself."""
        children: dict[int, list[int]] = {}
        for (parent, _), node in self.node_of.items():
            children.setdefault(parent, []).append(node)
        at = ROOT
        for token in emitted:
            for node in children.get(at, ()):
                yield node, self.token_ids[node] == token
            found = self.node_of.get((at, token))
            if found is None:
                return
            at = found

    def kept(
        self,
        values: Float64[np.ndarray, " nodes"],
        nodes: Int64[np.ndarray, " kept"],
        second_id: int,
        *,
        is_sampled: bool = False,
    ) -> Candidates:
        """Return the given nodes as candidates."""
        # The parent index ROOT = -1 selects the last element, which stays ROOT.
        new_index = np.full(len(self.token_ids) + 1, ROOT)
        new_index[nodes] = np.arange(len(nodes))
        proposers = np.full(len(self.token_ids), second_id)
        proposers[: self.num_first] = self.first.proposer_id
        drawn = np.full(len(self.token_ids), -1)
        if is_sampled:
            drawn[: self.num_first] = self.first.rank
        return Candidates(
            np.array(self.token_ids, np.int64)[nodes],
            new_index[np.array(self.parents, np.int64)[nodes]],
            np.array(self.depths, np.int64)[nodes],
            values[nodes],
            source=proposers[nodes],
            drawn=drawn[nodes],
            is_valid=np.array(self.is_valid, np.bool_)[nodes],
        )

    def best(
        self, values: Float64[np.ndarray, " nodes"], count: int, among: Bool[np.ndarray, " nodes"]
    ) -> Int64[np.ndarray, " kept"]:
        """Return the nodes with the highest values, in ascending order of their indices.

        The parents of these nodes are also returned if `among` includes them.
        """
        # A parent comes before its children and never has a lower value, so a stable sort ranks the
        # parent before the children.
        order = np.argsort(-values, kind="stable")
        return np.sort(order[(among & np.array(self.is_valid, np.bool_))[order]][:count])

    def _join(self, parent: int, token: int, depth: int, share: float) -> int:
        node = self.node_of.get((parent, token))
        if node is not None:
            if self.sources[node] == FIRST:
                self.sources[node] = BOTH
            return node
        self.token_ids.append(token)
        self.parents.append(parent)
        self.depths.append(depth)
        self.scores.append(min(1.0, share))
        self.sources.append(SECOND)
        self.is_valid.append(True)
        return self.node_of.setdefault((parent, token), len(self.token_ids) - 1)


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
        return float(self._learned.rates(shape_cells(shape), 0.5, DOUBT_OF_NODES).sum())


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
        return len(gains) * sampled.worth(shapes[size]) + sum(
            sum(expected[:rest]) for expected in gains
        )

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


class Knowledge:
    """Statistics on two sources of candidates, in constant memory; thread-safe."""

    def __init__(self, shape: TreeShape) -> None:
        self.candidates = Calibration()
        self.sampled = SampledNodes(shape)

    def learn(self, pool: CandidatePool, emitted: Sequence[int]) -> None:
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
