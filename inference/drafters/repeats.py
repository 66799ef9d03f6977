"""Leaves of a draft tree go on as the same tokens do elsewhere in it (arXiv 2407.16207)."""

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from pydantic import Field

from inference.draft_tree import ROOT
from inference.drafters.candidates import Candidates
from jakiro.settings import Settings


class RepeatSettings(Settings):
    """When words count as the same, and how far what follows them is repeated."""

    num_nodes: int = Field(16, ge=1)  # most candidates of a tree, the repeated ones included
    depth: int = Field(8, ge=1)
    before: int = Field(1, ge=0)  # tokens before a candidate's that must be the same, too
    prune: float = Field(0.1, ge=0, le=1)  # of a sibling's greatest score: worse ones go


class Repeated(NamedTuple):
    """A tree with repeats.

    Attributes:
        candidates: parents first.
        origins: what each of them is a copy of, in the tree that was drafted.
    """

    candidates: Candidates
    origins: list[int]


def with_repeats(
    tree: Candidates, settings: RepeatSettings, num_nodes: int, depth: int
) -> Repeated:
    """Return a tree whose leaves go on as the same tokens do elsewhere in it.

    The published method merges equal nodes into a graph, so that what follows is drafted once; here
    the graph is unrolled into the likeliest paths. Scores are those of a drafter, which would have
    said much the same there: candidates stay chosen ones, whatever is made of their scores.

    Args:
        tree: what was drafted.
        settings: of the repeats.
        num_nodes: most candidates of the result, if fewer than in the settings.
        depth: longest path of the result, if shorter than in the settings.
    """
    limit, longest = min(num_nodes, settings.num_nodes), min(depth, settings.depth)
    return _Unrolled(tree, settings).best(limit, longest)


class _Unrolled:
    """The paths of a tree in which equal ends lead to the same continuations.

    Args:
        tree: what was drafted.
        settings: of the repeats.
    """

    def __init__(self, tree: Candidates, settings: RepeatSettings) -> None:
        self.settings = settings
        self.tokens, self.parents = tree.token_ids.tolist(), tree.parents.tolist()
        self.children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            self.children.setdefault(parent, []).append(node)
        above = np.append(tree.scores, 1.0)[tree.parents]  # ROOT = -1 looks at the last one
        self.shares = (tree.scores / above).tolist()
        self.followed: dict[tuple[int, ...], list[int]] = {}  # end of a path -> inner nodes
        for node in self.children:
            if node != ROOT and (end := self._end(self._path(node))) is not None:
                self.followed.setdefault(end, []).append(node)

    def best(self, limit: int, longest: int) -> Repeated:
        """Return the likeliest paths as a tree, parents first."""
        chosen: list[tuple[int, int, int, float]] = []  # token, parent, depth, score
        origins: list[int] = []
        paths: list[tuple[int, ...]] = []
        # Smallest first: (-score, turn, node of the tree, parent among the chosen, depth).
        waiting: list[tuple[float, int, int, int, int]] = []
        turn = 0
        for child in self._likely(ROOT):
            heappush(waiting, (-self.shares[child], turn, child, ROOT, 1))
            turn += 1
        while waiting and len(chosen) < limit:
            negative, _, node, parent, depth = heappop(waiting)
            path = (*(paths[parent] if parent != ROOT else ()), self.tokens[node])
            place = len(chosen)
            chosen.append((self.tokens[node], parent, depth, -negative))
            origins.append(node)
            paths.append(path)
            source = self._source(node, path)
            if depth == longest or source is None:
                continue
            for child in self._likely(source):
                heappush(waiting, (negative * self.shares[child], turn, child, place, depth + 1))
                turn += 1
        return Repeated(_as_candidates(chosen), origins)

    def _source(self, node: int, path: tuple[int, ...]) -> int | None:
        """Return the node whose children follow a path that ends in `node`."""
        if node in self.children:
            return node
        end = self._end(path)
        ancestors = set(self._nodes(node))
        found = (one for one in self.followed.get(end or (), ()) if one not in ancestors)
        return next(found, None)

    def _likely(self, node: int) -> Iterator[int]:
        """Yield the children of a node but for those that are much less likely than the best."""
        siblings = self.children.get(node, [])
        least = self.settings.prune * max((self.shares[one] for one in siblings), default=0.0)
        return (one for one in siblings if self.shares[one] >= least)

    def _end(self, path: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the last tokens of a path, which must be the same; None where there are fewer."""
        count = self.settings.before + 1
        return path[-count:] if len(path) >= count else None

    def _path(self, node: int) -> tuple[int, ...]:
        return tuple(self.tokens[one] for one in self._nodes(node))[::-1]

    def _nodes(self, node: int) -> list[int]:
        """Return a node and those above it."""
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return nodes


def _as_candidates(chosen: list[tuple[int, int, int, float]]) -> Candidates:
    if not chosen:
        return Candidates.none()
    *integers, scores = zip(*chosen, strict=True)
    token_ids, parents, depths = np.array(integers, np.int64)
    return Candidates(token_ids, parents, depths, np.array(scores))
