"""The session of two drafters that share trees."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from inference.draft_tree import ROOT, DraftTree, TreeRow
from inference.drafters.candidates import Candidates
from inference.drafters.combined_knowledge import CombinedSettings, Knowledge
from inference.drafters.drawn_places import drawn_budget
from inference.drafters.mixed_tree import Kept, mixed_tree
from inference.drafters.pool import FIRST, Pool
from inference.drafters.small_lm import SmallLMSession
from inference.drafters.token_session import TokenSession
from inference.drafters.trained import TrainedSession
from inference.protocol import Budget, Committed, VerifyResult
from inference.sampling import Sampling

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
        self.adopt(sampling)

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
        self._kept = [self._chosen(row, views[row], scores[row], limit) for row in rows]
        return mixed_tree(self._kept, tree, self.second_id)

    def feedback(self, result: VerifyResult) -> None:
        """Learn which candidates the target continued with, whether they were verified or not."""
        if result.base_length != list(self.lengths) or not self._kept:
            return  # a plain step, of which the session is told later
        for row, one in enumerate(self._kept):
            nodes = one.nodes[result.path[row]].tolist()
            accepted = [one.pool.token_ids[node] for node in nodes]
            emitted = [*accepted, result.next_token[row]]
            self.knowledge.learn(one.pool, emitted)
            if self.shape.sampled:
                drawn = [n for n in one.pool.follow(emitted) if n < one.pool.num_first]
                guess = self._guesses[row]
                self.knowledge.learn_drawn(one.row, one.pool, guess, drawn, emitted)
            visited = [ROOT, *result.path[row]]
            self.second.learn(row, accepted, partial(result.logits, row, visited))

    def conclude(self, place: int, token_ids: Sequence[int]) -> None:
        """Let the second drafter learn."""
        self.second.conclude(place, token_ids)

    def rollback(self, length: int) -> None:
        """Forget the tokens from position `length` on; what was learnt from them stays."""
        self.first.rollback(length)
        self.second.rollback(length)
        self._kept = []

    def keep(self, places: Sequence[int]) -> None:
        """Forget all sequences but those at these places, which are ascending."""
        self.first.keep(places)
        self.second.keep(places)
        self._kept = []

    def adopt(self, sampling: Sampling) -> None:
        """Draft for another way of sampling from now on."""
        self.first.adopt(sampling)
        self.second.adopt(sampling)
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
        share = drawn_budget(self.knowledge.places, self.shape, limit, gains)
        return Budget(share, limit.depth)

    def _chosen(self, row: int, view: TreeRow, scores: list[float], limit: Budget) -> Kept:
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
