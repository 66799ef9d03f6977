"""The session of two drafters that share trees."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor
from torch.nn.functional import pad

from inference.draft_tree import ROOT, CandidateKind, DraftTree, SparseDistribution, TreeRow
from inference.drafters.base import TokenSession
from inference.drafters.candidates import Candidates
from inference.drafters.combined.knowledge import CombinedSettings, Knowledge, sampled_budget
from inference.drafters.combined.pool import FIRST, Pool
from inference.drafters.small_lm import SmallLMSession
from inference.drafters.trained.drafter import TrainedSession
from inference.protocol import Budget, Committed, VerifyResult
from inference.sampling import Sampling


class Kept(NamedTuple):
    """What stays of one sequence's candidates; all that were drawn do."""

    row: TreeRow  # of the first source
    pool: Pool
    values: Float64[np.ndarray, " nodes"]  # of the whole pool
    nodes: Int64[np.ndarray, " kept"]  # ascending; parents are among them


def mixed_tree(rows: Sequence[Kept], first: DraftTree, second_id: int) -> DraftTree:
    """Return trees of two sources' candidates.

    Args:
        rows: of each sequence.
        first: the first source's trees, with the laws that drawn candidates came from.
        second_id: proposer of what the first source does not have.
    """
    count = max(len(one.nodes) for one in rows)
    if count == 0:
        return DraftTree.empty(first.base_length, first.step_id)
    is_sampled = first.draft_probs is not None
    columns = np.stack([_columns(one, is_sampled, second_id, count) for one in rows], axis=1)
    score = np.stack([_scores(one, count) for one in rows])
    device = first.base_length.device
    token_ids, parent, depth, kind, rank, proposer_id, is_valid = torch.from_numpy(columns).to(
        device
    )
    return DraftTree(
        token_ids=token_ids,
        parent=parent,
        depth=depth,
        score=torch.from_numpy(score).to(device),
        kind=kind,
        rank=rank,
        proposer_id=proposer_id,
        is_valid=is_valid.bool(),
        base_length=first.base_length,
        max_depth=int(columns[2].max()),
        max_siblings=max(int(np.bincount(one + 1).max()) for one in columns[1]),
        step_id=first.step_id,
        draft_probs=_padded(first.draft_probs, count),
    )


def _columns(
    one: Kept, is_sampled: bool, second_id: int, count: int
) -> Int64[np.ndarray, "fields nodes"]:
    """Return token, parent, depth, kind, rank, proposer and validity; padding stands at ROOT."""
    pool, nodes = one.pool, one.nodes
    place = np.full(len(pool.token_ids) + 1, ROOT)  # the last one is where ROOT = -1 looks
    place[nodes] = np.arange(len(nodes))
    is_first = nodes < pool.num_first
    proposers = np.full(len(pool.token_ids), second_id)
    proposers[: pool.num_first] = one.row.proposer_id
    fields = np.zeros((7, count), np.int64)
    fields[1], fields[2] = ROOT, 1
    kept = fields[:, : len(nodes)]
    kept[0] = np.array(pool.token_ids, np.int64)[nodes]
    kept[1] = place[np.array(pool.parents, np.int64)[nodes]]
    kept[2] = np.array(pool.depths, np.int64)[nodes]
    sampled = is_first & is_sampled
    kept[3] = np.where(sampled, int(CandidateKind.SAMPLED), int(CandidateKind.DETERMINISTIC))
    kept[4] = _ranks(one, sampled)
    kept[5] = proposers[nodes]
    kept[6] = np.array(pool.is_valid, np.int64)[nodes]
    return fields


def _ranks(one: Kept, sampled: Bool[np.ndarray, " kept"]) -> Int64[np.ndarray, " kept"]:
    """Return the draw order of drawn candidates, the order by value of the others."""
    ranks = np.zeros(len(one.nodes), np.int64)
    ranks[sampled] = np.array(one.row.rank, np.int64)[one.nodes[sampled]]
    chosen = np.flatnonzero(~sampled)
    order = np.argsort(-one.values[one.nodes[chosen]], kind="stable")
    ranks[chosen[order]] = np.arange(len(chosen))
    return ranks


def _scores(one: Kept, count: int) -> Float[np.ndarray, " nodes"]:
    scores = np.full(count, -np.inf, np.float32)
    with np.errstate(divide="ignore"):
        scores[: len(one.nodes)] = np.log(one.values[one.nodes])
    return scores


def _padded(draft_probs: SparseDistribution | None, count: int) -> SparseDistribution | None:
    """Return laws of ROOT and `count` nodes; nothing was drawn below those that came later."""
    if draft_probs is None:
        return None
    more: int = count + 1 - draft_probs.ids.shape[1]

    def longer(rows: Tensor) -> Tensor:
        return pad(rows, (0, 0, 0, more))

    return SparseDistribution(longer(draft_probs.ids), longer(draft_probs.probs))


KnowledgeOf = Callable[[bool, bool], Knowledge]  # tokens are drawn, candidates are drawn


class CombinedSession:
    """Sessions of both drafters, of the same sequences.

    Args:
        first: whose candidates come first.
        second: that guesses how the text goes on.
        settings: how they share trees.
        sampling: how tokens are drawn.
        knowledge_of: what was learnt of them.
        second_id: proposer of what only the second one has.
        max_depth: of trees.
    """

    def __init__(
        self,
        first: TrainedSession | SmallLMSession,
        second: TokenSession,
        settings: CombinedSettings,
        sampling: Sampling,
        knowledge_of: KnowledgeOf,
        second_id: int,
        max_depth: int,
    ) -> None:
        self.first, self.second = first, second
        self.settings = settings
        self.knowledge_of = knowledge_of
        self.second_id = second_id
        self.max_depth = max_depth
        self._kept: list[Kept] = []
        self._guesses: list[Candidates] = []
        self.set_sampling(sampling)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Verified tokens taken in so far, per sequence."""
        return self.first.lengths

    def advance(self, committed: Committed) -> None:
        """Take in newly verified tokens and the roots.

        Raises:
            ValueError: as of the two sessions.
        """
        self.first.advance(committed)
        self.second.advance(committed)

    def propose(self, budget: Budget, generators: Sequence[torch.Generator]) -> DraftTree:
        """Return trees below the roots, within the budget.

        Args:
            budget: shared by both drafters.
            generators: sources of the draws of the first one.
        """
        depth = self.max_depth if budget.depth is None else min(budget.depth, self.max_depth)
        limit = Budget(min(budget.num_nodes, self.num_nodes), depth)
        if min(limit.num_nodes, depth) < 1:
            self._kept = []
            return self.first.propose(Budget(0), generators)
        rows = range(len(self.lengths))
        self._guesses = [self.second.guess(row, [], limit.num_nodes, depth) for row in rows]
        tree = self.first.propose(self._share(limit), generators)
        scores = tree.score.tolist()
        views = tree.rows(tree.token_ids[:, :0])[0]
        self._kept = [self._pooled(row, views[row], scores[row], limit) for row in rows]
        return mixed_tree(self._kept, tree, self.second_id)

    def on_verified(self, result: VerifyResult) -> None:
        """Learn which candidates the target continued with, whether they were verified or not."""
        if result.base_length != list(self.lengths) or not self._kept:
            return  # a plain step, of which the session is told later
        for row, one in enumerate(self._kept):
            nodes = one.nodes[result.path[row]].tolist()
            accepted = [one.pool.token_ids[node] for node in nodes]
            emitted = [*accepted, result.next_token[row]]
            self.knowledge.learn(one.pool, emitted)
            if self.shape.sampled:
                sampled = [n for n in one.pool.follow(emitted) if n < one.pool.num_first]
                guess = self._guesses[row]
                self.knowledge.learn_sampled(one.row, one.pool, guess, sampled, emitted)
            visited = [ROOT, *result.path[row]]
            self.second.learn(row, accepted, partial(result.logits, row, visited))

    def on_finished(self, place: int, token_ids: Sequence[int]) -> None:
        """Let the second drafter learn."""
        self.second.on_finished(place, token_ids)

    def rollback(self, length: int) -> None:
        """Forget the tokens from position `length` on; what was learnt from them stays."""
        self.first.rollback(length)
        self.second.rollback(length)
        self._kept = []

    def select_sequences(self, places: Sequence[int]) -> None:
        """Forget all sequences but those at these places, which are ascending."""
        self.first.select_sequences(places)
        self.second.select_sequences(places)
        self._kept = []

    def set_sampling(self, sampling: Sampling) -> None:
        """Draft for another way of sampling from now on."""
        self.first.set_sampling(sampling)
        self.second.set_sampling(sampling)
        self.shape = self.first.shape
        self.num_nodes = self.settings.num_nodes or self.shape.max_nodes
        self.knowledge = self.knowledge_of(sampling.do_sample, self.shape.sampled)

    def reserve(self, capacity: int) -> None:
        """Make room for sequences of up to `capacity` tokens."""
        self.first.reserve(capacity)
        self.second.reserve(capacity)

    def close(self) -> None:
        """Free both sessions."""
        self.first.close()
        self.second.close()

    def _share(self, limit: Budget) -> Budget:
        """Return the first drafter's budget; chosen candidates are compared one by one instead."""
        if not self.shape.sampled:
            return limit
        gains = [self.knowledge.gains(guess) for guess in self._guesses]
        share = sampled_budget(self.knowledge.places, self.shape, limit, gains)
        return Budget(share, limit.depth)

    def _pooled(self, row: int, view: TreeRow, scores: list[float], limit: Budget) -> Kept:
        """Return what stays of both drafters' candidates of a sequence."""
        pool = Pool(view, scores)
        assert limit.depth is not None
        pool.graft(ROOT, self._guesses[row], limit.depth)
        for anchor in self._anchors(pool, limit.depth):
            left = limit.depth - pool.depths[anchor]
            nodes = self.settings.graft_nodes
            guess = self.second.guess(row, pool.path(anchor), nodes, left)
            pool.graft(anchor, guess, limit.depth)
        values = pool.values(self.knowledge.candidates)
        is_first = np.arange(len(values)) < pool.num_first
        if not self.shape.sampled:
            every = np.ones_like(is_first)
            return Kept(view, pool, values, pool.best(values, limit.num_nodes, every))
        chosen = pool.best(values, limit.num_nodes - pool.num_first, ~is_first)
        return Kept(view, pool, values, np.concatenate((np.flatnonzero(is_first), chosen)))

    def _anchors(self, pool: Pool, depth: int) -> list[int]:
        """Return the likeliest candidates that only the first drafter has."""
        values = pool.values(self.knowledge.candidates)
        places = [
            node
            for node in range(pool.num_first)
            if pool.is_valid[node] and pool.sources[node] == FIRST and pool.depths[node] < depth
        ]
        places.sort(key=lambda node: -values[node])
        return places[: self.settings.grafts]
