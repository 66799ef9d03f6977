"""One sequence's candidates of two sources, in one tree in which siblings differ."""

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64

from inference.draft_tree import ROOT, TreeRow
from inference.drafters.calibration import Calibration
from inference.drafters.candidates import Candidates

FIRST, SECOND, BOTH = range(3)  # which source has a candidate
SOURCES = 3


class Pool:
    """Candidates of a first source, and those of a second that are grafted onto them.

    Args:
        row: the first source's tree; its nodes keep their places.
        scores: their cumulative log-probabilities.
    """

    def __init__(self, row: TreeRow, scores: Sequence[float]) -> None:
        self.token_ids = list(row.token_ids)
        self.parents = list(row.parent)
        self.depths = list(row.depth)
        self.num_first = len(scores)
        above = [0.0 if parent == ROOT else scores[parent] for parent in row.parent]
        self.scores = [  # conditional probabilities, as their source says
            float(np.exp(min(0.0, own - parent))) if own > -np.inf else 0.0
            for own, parent in zip(scores, above, strict=True)
        ]
        self.sources = [FIRST] * self.num_first
        self.is_valid = [False] * self.num_first
        self.place_of: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        for parent, siblings in row.children.items():
            for node in siblings:
                self.is_valid[node] = True
                self.place_of[parent, row.token_ids[node]] = node

    def graft(self, anchor: int, guess: Candidates, depth: int) -> list[int]:
        """Take in continuations of a node (or ROOT); return where each of their nodes is now.

        Args:
            anchor: where they go on.
            guess: of the second source.
            depth: of the tree, beyond which nothing is taken in; such nodes are at ROOT.
        """
        places: list[int] = []
        columns = zip(*(one.tolist() for one in guess), strict=True)
        for token, parent, below, score in columns:
            level = below + (0 if anchor == ROOT else self.depths[anchor])
            if level > depth:
                places.append(ROOT)
                continue
            above = anchor if parent == ROOT else places[parent]
            share = score / (1.0 if parent == ROOT else float(guess.scores[parent]))
            places.append(self._join(above, token, level, share))
        return places

    def follow(self, token_ids: Sequence[int]) -> list[int]:
        """Return the nodes that tokens lead to from the root, as far as there are any."""
        nodes: list[int] = []
        at = ROOT
        for token in token_ids:
            found = self.place_of.get((at, token))
            if found is None:
                break
            nodes.append(at := found)
        return nodes

    def path(self, node: int) -> list[int]:
        """Return the tokens from the first level down to a node."""
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self.token_ids[node])
            node = self.parents[node]
        return tokens[::-1]

    def values(self, calibration: Calibration) -> Float64[np.ndarray, " nodes"]:
        """Return how likely each candidate's whole path is right; never more than the parent's."""
        rates = calibration.rates(
            np.array(self.sources, np.int64), np.array(self.depths, np.int64), np.array(self.scores)
        )
        values = np.zeros(len(rates))
        for node, (parent, rate) in enumerate(zip(self.parents, rates.tolist(), strict=True)):
            if self.is_valid[node]:
                values[node] = rate * (1.0 if parent == ROOT else values[parent])
        return values

    def outcomes(self, emitted: Sequence[int]) -> Iterator[tuple[int, bool]]:
        """Yield the candidates whose parents proved right, and whether they did themselves.

        Args:
            emitted: the tokens that followed the root.
        """
        children: dict[int, list[int]] = {}
        for (parent, _), node in self.place_of.items():
            children.setdefault(parent, []).append(node)
        at = ROOT
        for token in emitted:
            for node in children.get(at, ()):
                yield node, self.token_ids[node] == token
            found = self.place_of.get((at, token))
            if found is None:
                return
            at = found

    def candidates(
        self, values: Float[np.ndarray, " nodes"], kept: Int64[np.ndarray, " kept"]
    ) -> Candidates:
        """Return some nodes as candidates; their parents count all nodes of the pool."""
        return Candidates(
            np.array(self.token_ids, np.int64)[kept],
            np.array(self.parents, np.int64)[kept],
            np.array(self.depths, np.int64)[kept],
            values[kept].clip(min=1e-12),
        )

    def best(
        self, values: Float64[np.ndarray, " nodes"], count: int, among: Bool[np.ndarray, " nodes"]
    ) -> Int64[np.ndarray, " kept"]:
        """Return the most valuable nodes in the order of the pool; parents come with children."""
        # A parent stands before its children and is worth no less: a stable order keeps it.
        order = np.argsort(-values, kind="stable")
        return np.sort(order[(among & np.array(self.is_valid, np.bool_))[order]][:count])

    def _join(self, parent: int, token: int, depth: int, share: float) -> int:
        """Return the node of a token below a parent, which is new where there was none."""
        node = self.place_of.get((parent, token))
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
        return self.place_of.setdefault((parent, token), len(self.token_ids) - 1)
