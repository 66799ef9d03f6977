"""One sequence's candidates of two sources, in one tree in which siblings differ."""

from collections.abc import Iterator, Sequence
from threading import Lock

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64

from inference.draft_tree import ROOT, TreeRow
from inference.drafters.candidates import Candidates

# Of a candidate's own conditional probability; candidates between two of them count alike.
EDGES = np.array([0.01, 0.03, 0.06, 0.1, 0.17, 0.25, 0.35, 0.5, 0.65, 0.8, 0.92])
DEPTHS = 3  # deeper candidates count alike


class Calibration:
    """Running estimates by source, depth and score, of fixed size; threads may share them.

    Each says how often a candidate is right of whose parent that is known. Until something was
    seen it is the candidate's own score, times the trust in its source.

    Args:
        trust: in each source.
        doubt: trials that the beginning counts for.
        memory: trials after which an observation weighs 1/e.
    """

    def __init__(self, trust: tuple[float, ...], doubt: float, memory: float) -> None:
        self.trust = np.array(trust)
        self.doubt = doubt
        self.memory = memory
        self._counts = np.zeros((2, len(trust), DEPTHS, len(EDGES) + 1))  # hits, trials
        self._lock = Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of the counts, however much is learnt."""
        return self._counts.nbytes

    def rates(
        self,
        sources: Int64[np.ndarray, " n"],
        depths: Int64[np.ndarray, " n"],
        scores: Float64[np.ndarray, " n"],
    ) -> Float64[np.ndarray, " n"]:
        """Return how often such candidates are right if their parents are.

        Args:
            sources: of the candidates.
            depths: of the candidates, from 1.
            scores: their conditional probabilities, as their sources say.
        """
        with self._lock:
            hits, trials = self._counts[:, *_cells(sources, depths, scores)]
        return (hits + self.doubt * self.trust[sources] * scores) / (trials + self.doubt)

    def add(
        self,
        sources: Int64[np.ndarray, " n"],
        depths: Int64[np.ndarray, " n"],
        scores: Float64[np.ndarray, " n"],
        is_right: Bool[np.ndarray, " n"],
    ) -> None:
        """Take in what became of candidates whose parents were right."""
        cells = _cells(sources, depths, scores)
        with self._lock:
            # What was seen before fades where something new is seen.
            kept = np.zeros(self._counts.shape[1:])
            np.add.at(kept, cells, 1.0)
            self._counts *= np.exp(-kept / self.memory)
            np.add.at(self._counts[0], cells, is_right.astype(float))
            np.add.at(self._counts[1], cells, 1.0)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._counts.fill(0.0)


def _cells(
    sources: Int64[np.ndarray, " n"],
    depths: Int64[np.ndarray, " n"],
    scores: Float64[np.ndarray, " n"],
) -> tuple[
    Int64[np.ndarray, " n"],
    Int64[np.ndarray, " n"],
    Int64[np.ndarray, " n"],
]:
    return sources, np.minimum(depths, DEPTHS) - 1, np.searchsorted(EDGES, scores)


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
