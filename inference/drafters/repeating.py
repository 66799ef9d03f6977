"""A drafter that continues repetitions in the deterministic trees of another drafter.

The method follows graph-structured speculative decoding (arXiv 2407.16207).
"""

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

import numpy as np
from pydantic import Field

from inference.draft_tree import ROOT, DraftTree, SequenceTree
from inference.drafters.candidates import Candidates, to_tree
from inference.drafters.delegating import DelegatingDrafter, DelegatingSession
from inference.protocol import Budget, Drafter, DraftSession
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import StepRandom
from inference.trees import MOST_CANDIDATES
from jakiro.errors import ConfigError
from jakiro.utils.settings import Settings


class RepeatSettings(Settings):
    """Settings that define a repetition, and limits of the trees that include repetitions."""

    # largest number of candidates, including repetitions
    num_nodes: int = Field(16, ge=1, le=MOST_CANDIDATES)
    # largest number of tokens on a path, including repetitions
    depth: int = Field(8, ge=1, le=MOST_CANDIDATES)
    # number of tokens before the last one that two paths must share to be continued alike
    before: int = Field(1, ge=0)
    # siblings whose scores are below this share of the best sibling's score are left out
    prune: float = Field(0.1, ge=0, le=1)


def with_repeats(
    tree: Candidates, settings: RepeatSettings, num_nodes: int, depth: int
) -> Candidates:
    """Return a tree whose leaves are continued like other paths with the same last tokens.

    If the path to a leaf ends with the same tokens as another path, the continuations of that path
    are copied to the leaf. The published method merges such nodes into a graph, so that their
    continuation is drafted only once; here this graph is unrolled into its most likely paths. The
    candidates remain deterministic, so that acceptance is exact for any scores. The column `origin`
    of the result contains the node of `tree` from which each candidate was copied.
    """
    limit, longest = min(num_nodes, settings.num_nodes), min(depth, settings.depth)
    return _Unrolled(tree, settings).best(limit, longest)


class _Unrolled:
    """The paths of a tree in which paths with the same last tokens have the same continuations."""

    def __init__(self, tree: Candidates, settings: RepeatSettings) -> None:
        self.settings = settings
        self.tokens, self.parents = tree.token_ids.tolist(), tree.parents.tolist()
        self.children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            self.children.setdefault(parent, []).append(node)
        self.shares = tree.shares.tolist()
        self.followed: dict[tuple[int, ...], list[int]] = {}  # last tokens of a path -> inner nodes
        for node in self.children:
            if node != ROOT and (end := self._end(self._path(node))) is not None:
                self.followed.setdefault(end, []).append(node)

    def best(self, limit: int, longest: int) -> Candidates:
        nodes: list[tuple[int, int, int, float]] = []  # token, parent, depth, score
        origin: list[int] = []
        paths: list[tuple[int, ...]] = []
        # A heap with the smallest entry first: (-score, order, node of the drafted tree, parent in
        # the new tree, depth).
        waiting: list[tuple[float, int, int, int, int]] = []
        order = 0
        for child in self._likely(ROOT):
            heappush(waiting, (-self.shares[child], order, child, ROOT, 1))
            order += 1
        while waiting and len(nodes) < limit:
            negative, _, node, parent, depth = heappop(waiting)
            path = (*(paths[parent] if parent != ROOT else ()), self.tokens[node])
            copy = len(nodes)
            nodes.append((self.tokens[node], parent, depth, -negative))
            origin.append(node)
            paths.append(path)
            source = self._source(node, path)
            if depth == longest or source is None:
                continue
            for child in self._likely(source):
                heappush(waiting, (negative * self.shares[child], order, child, copy, depth + 1))
                order += 1
        return Candidates.of(nodes)._replace(origin=np.array(origin, np.int64))

    def _source(self, node: int, path: tuple[int, ...]) -> int | None:
        """Return the node whose children continue a path that ends in `node`, or None."""
        if node in self.children:
            return node
        end = self._end(path)
        ancestors = set(self._nodes(node))
        matching = (other for other in self.followed.get(end or (), ()) if other not in ancestors)
        return next(matching, None)

    def _likely(self, node: int) -> Iterator[int]:
        """Yield the children of a node, except those that are much less likely than the best."""
        siblings = self.children.get(node, [])
        least = self.settings.prune * max((self.shares[child] for child in siblings), default=0.0)
        return (child for child in siblings if self.shares[child] >= least)

    def _end(self, path: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the last tokens, which repetitions share; None if the path is too short."""
        count = self.settings.before + 1
        return path[-count:] if len(path) >= count else None

    def _path(self, node: int) -> tuple[int, ...]:
        return tuple(self.tokens[above] for above in self._nodes(node))[::-1]

    def _nodes(self, node: int) -> list[int]:
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return nodes


class RepeatingDrafter(DelegatingDrafter):
    """Drafter that continues repetitions in the trees of another drafter.

    Example:
        decoder = SpeculativeDecoder(target, RepeatingDrafter(LookupDrafter()), tokenizer)
        output = decoder.generate("a b a b a", max_new_tokens=16)
    """

    def __init__(self, drafter: Drafter, settings: RepeatSettings | None = None) -> None:
        super().__init__(drafter)
        self.settings = settings or RepeatSettings()

    # The limits of the other drafter do not apply, because its trees are never verified unchanged.
    @property
    def max_nodes(self) -> int:
        return self.settings.num_nodes

    @property
    def max_depth(self) -> int:
        return self.settings.depth

    def new_session(self, sampling: Sampling, capacity: int, batch: int = 1) -> "RepeatingSession":
        """Return a session for `batch` sequences of up to `capacity` tokens.

        Raises:
            ConfigError: the drafter samples candidates with these sampling options.
        """
        session = super().new_session(sampling, capacity, batch)
        return RepeatingSession(session, self.settings, self.drafter.max_nodes)


class RepeatingSession(DelegatingSession):
    def __init__(self, session: DraftSession, settings: RepeatSettings, num_nodes: int) -> None:
        super().__init__(session)
        _refuse_sampled(session)
        self.settings = settings
        self.num_nodes = num_nodes

    def propose(self, budget: Budget, random: StepRandom) -> DraftTree:
        asked = self.num_nodes if budget.num_nodes > 0 else 0
        tree = self.session.propose(Budget(asked, budget.depth), random)
        rows = zip(tree.to_host(), tree.score.exp().double().tolist(), strict=True)
        depth = self.settings.depth if budget.depth is None else budget.depth
        repeated = [self._repeated(row, scores, budget.num_nodes, depth) for row, scores in rows]
        return to_tree(repeated, tree.base_length)

    def set_sampling(self, sampling: Sampling) -> None:
        super().set_sampling(sampling)
        _refuse_sampled(self.session)

    def _repeated(
        self, tree: SequenceTree, scores: Sequence[float], num_nodes: int, depth: int
    ) -> Candidates:
        """Return the valid candidates of a sequence's tree, with repetitions."""
        nodes = sorted(node for siblings in tree.children.values() for node in siblings)
        new_index = {ROOT: ROOT, **{node: index for index, node in enumerate(nodes)}}
        drafted = Candidates(
            np.array([tree.token_ids[node] for node in nodes], np.int64),
            np.array([new_index[tree.parent[node]] for node in nodes], np.int64),
            np.array([tree.depth[node] for node in nodes], np.int64),
            np.array([scores[node] for node in nodes]).clip(min=1e-30),
        )
        repeated = with_repeats(drafted, self.settings, num_nodes, depth)
        assert repeated.origin is not None
        origin = np.array(nodes, np.int64)[repeated.origin]
        return repeated._replace(origin=origin, source=np.array(tree.proposer_id, np.int64)[origin])


def _refuse_sampled(session: DraftSession) -> None:
    if session.is_sampled:
        raise ConfigError(
            "repetitions cannot be added to trees of sampled candidates",
            expected="a drafter whose trees are deterministic at every temperature",
            got="a drafter whose trees are sampled",
            remedy="set sampled=False in the TreeShape or SmallLMSettings of this drafter",
        )
