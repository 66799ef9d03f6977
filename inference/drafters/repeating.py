"""A drafter whose trees go on where they repeat themselves, over any drafter that chooses."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from inference.draft_tree import ROOT, DraftTree, TreeRow
from inference.drafters.candidates import Candidates, deterministic_tree
from inference.drafters.combined.session import CombinedSession
from inference.drafters.small_lm import SmallLMSession
from inference.drafters.trained.drafter import TrainedSession
from inference.protocol import Budget, Committed, Drafter, DraftSession, EncodedMemory, VerifyResult
from inference.sampling import Sampling
from jakiro.errors import ConfigError
from jakiro.target.adapter import StepOutput
from jakiro.utils.settings import Settings


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


class RepeatingDrafter:
    """Drafts as another drafter does, and repeats what its trees say twice.

    Args:
        drafter: whose trees are chosen, not drawn.
        settings: of the repeats.
    """

    def __init__(self, drafter: Drafter, settings: RepeatSettings | None = None) -> None:
        self.drafter = drafter
        self.settings = settings or RepeatSettings()
        self.needs = drafter.needs
        self.hidden_states = drafter.hidden_states
        self.version = drafter.version
        self.request_counter = drafter.request_counter
        self.bytes_per_token = drafter.bytes_per_token
        # The other one's trees are never verified as they are.
        self.max_nodes = self.settings.num_nodes
        self.max_depth = self.settings.depth

    def new_session(self, sampling: Sampling, capacity: int, batch: int = 1) -> "RepeatingSession":
        """Return a session for `batch` sequences of up to `capacity` tokens.

        Raises:
            ConfigError: the drafter draws candidates for this way of sampling.
        """
        session = self.drafter.new_session(sampling, capacity, batch)
        return RepeatingSession(session, self.settings, self.drafter.max_nodes)

    def reset(self) -> None:
        """Pass on."""
        self.drafter.reset()

    def encode_memory(
        self, output: StepOutput, rows: Int[Tensor, "batch rows"] | None = None
    ) -> EncodedMemory:
        """Encode as the other drafter does."""
        return self.drafter.encode_memory(output, rows)


class _Row(NamedTuple):
    """One sequence's tree with repeats, and the one that it was made of."""

    drafted: TreeRow
    repeated: Repeated

    def own(self, path: Sequence[int]) -> list[int]:
        """Return the nodes of a path that are drafted ones, up to the first repeated one."""
        origins: list[int] = []
        at = ROOT
        for node in path:
            origin = self.repeated.origins[node]
            if self.drafted.parent[origin] != at:
                break
            origins.append(origin)
            at = origin
        return origins


class RepeatingSession:
    """A session whose trees are made longer.

    Args:
        session: that drafts.
        settings: of the repeats.
        num_nodes: most candidates that are drafted.
    """

    def __init__(self, session: DraftSession, settings: RepeatSettings, num_nodes: int) -> None:
        _refuse_sampled(session)
        self.session = session
        self.settings = settings
        self.num_nodes = num_nodes
        self._rows: list[_Row] = []

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the session that drafts."""
        return self.session.lengths

    def advance(self, committed: Committed) -> None:
        """Pass on."""
        self.session.advance(committed)

    def propose(self, budget: Budget, generators: Sequence[torch.Generator]) -> DraftTree:
        """Return trees below the roots, within the budget, repeats included."""
        asked = self.num_nodes if budget.num_nodes > 0 else 0
        tree = self.session.propose(Budget(asked, budget.depth), generators)
        drafted = tree.rows(tree.token_ids[:, :0])[0]
        scores = tree.score.exp().double().tolist()
        depth = self.settings.depth if budget.depth is None else budget.depth
        pairs = zip(drafted, scores, strict=True)
        self._rows = [
            _Row(row, self._repeated(row, own, budget.num_nodes, depth)) for row, own in pairs
        ]
        candidates = [row.repeated.candidates for row in self._rows]
        proposers = [
            [row.drafted.proposer_id[node] for node in row.repeated.origins] for row in self._rows
        ]
        return deterministic_tree(candidates, tree.base_length, tree.step_id, proposers)

    def on_verified(self, result: VerifyResult) -> None:
        """Pass on what is known of the tree that was drafted."""
        if result.base_length == list(self.lengths) and self._rows:
            self.session.on_verified(self._translated(result))

    def on_finished(self, place: int, token_ids: Sequence[int]) -> None:
        """Pass on."""
        self.session.on_finished(place, token_ids)

    def rollback(self, length: int) -> None:
        """Pass on."""
        self.session.rollback(length)
        self._rows = []

    def select_sequences(self, places: Sequence[int]) -> None:
        """Pass on."""
        self.session.select_sequences(places)
        self._rows = []

    def set_sampling(self, sampling: Sampling) -> None:
        """Pass on; errors as for `RepeatingDrafter.open`."""
        self.session.set_sampling(sampling)
        _refuse_sampled(self.session)

    def reserve(self, capacity: int) -> None:
        """Pass on."""
        self.session.reserve(capacity)

    def close(self) -> None:
        """Pass on."""
        self.session.close()

    def _repeated(
        self, row: TreeRow, scores: Sequence[float], num_nodes: int, depth: int
    ) -> Repeated:
        """Return a sequence's tree with repeats, its invalid candidates left out."""
        nodes = sorted(node for siblings in row.children.values() for node in siblings)
        place = {ROOT: ROOT, **{node: index for index, node in enumerate(nodes)}}
        tree = Candidates(
            np.array([row.token_ids[node] for node in nodes], np.int64),
            np.array([place[row.parent[node]] for node in nodes], np.int64),
            np.array([row.depth[node] for node in nodes], np.int64),
            np.array([scores[node] for node in nodes]).clip(min=1e-30),
        )
        found = with_repeats(tree, self.settings, num_nodes, depth)
        return Repeated(found.candidates, [nodes[origin] for origin in found.origins])

    def _translated(self, result: VerifyResult) -> VerifyResult:
        """Return a result in terms of the drafted trees: a path ends where repeats begin."""
        pairs = list(zip(self._rows, result.path, strict=True))
        paths = [row.own(path) for row, path in pairs]
        next_token = [
            int(row.repeated.candidates.token_ids[path[len(own)]]) if len(own) < len(path) else last
            for (row, path), own, last in zip(pairs, paths, result.next_token, strict=True)
        ]

        def verified(place: int, node: int) -> int:
            return node if node == ROOT else result.path[place][paths[place].index(node)]

        def target_probs(place: int, node: int) -> Float[Tensor, " vocab"]:
            return result.target_probs(place, verified(place, node))

        def logits(place: int, nodes: Sequence[int]) -> Float[Tensor, "nodes vocab"]:
            return result.logits(place, [verified(place, node) for node in nodes])

        return replace(
            result,
            path=paths,
            num_accepted=[len(own) for own in paths],
            next_token=next_token,
            target_probs=target_probs,
            logits=logits,
        )


def _refuse_sampled(session: DraftSession) -> None:
    shaped = TrainedSession | SmallLMSession | CombinedSession
    if isinstance(session, shaped) and session.shape.sampled:
        raise ConfigError(
            "repeats cannot be added to trees whose candidates are drawn",
            expected="a drafter that chooses its candidates at every temperature",
            got="trees with sampled=True",
            remedy="give the drafter a tree with sampled=False, or a small model drawn=False",
        )
