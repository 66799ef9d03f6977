"""The session of two drafters that share one tree for each sequence."""

from collections.abc import Callable, Sequence

import numpy as np
from torch.nn.functional import pad

from inference.draft_tree import ROOT, DraftTree, SequenceTree, SparseDistribution
from inference.drafters.base import TokenSession
from inference.drafters.candidates import Candidates, to_tree
from inference.drafters.combined.cascade import Cascade, Cascades
from inference.drafters.combined.knowledge import CombinedSettings, Knowledge, sampled_budget
from inference.drafters.combined.pool import FIRST, CandidatePool
from inference.drafters.small_lm import SmallLMSession
from inference.drafters.trained.drafter import TrainedSession
from inference.protocol import AdaptiveSession, Budget, Committed, DraftSession, VerifyResult
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import StepRandom
from inference.trees.shape import TreeShape


def mixed_tree(kept: Sequence[Candidates], first: DraftTree) -> DraftTree:
    """Return trees with the candidates of both drafters.

    Args:
        kept: candidates to verify, for each sequence, all sampled candidates first.
    """
    probs = first.draft_probs
    if probs is not None:  # nothing is sampled below the candidates of the second drafter
        more = max(len(own.token_ids) for own in kept) + 1 - probs.ids.shape[1]
        probs = SparseDistribution(*(pad(own, (0, 0, 0, more)) for own in (probs.ids, probs.probs)))
    return to_tree(kept, first.base_length, first.step_id, probs)


# The arguments are whether tokens are sampled, and the shape of the first drafter's trees.
KnowledgeOf = Callable[[bool, TreeShape], Knowledge]


class CombinedSession(AdaptiveSession):
    """A session that combines one session of each drafter, both for the same sequences.

    Args:
        cascades: rates and costs by which the first drafter drafts only where it saves time; None
            if it always drafts.
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
        cascades: Cascades | None = None,
    ) -> None:
        self.first, self.second = first, second
        self.settings = settings
        self.knowledge_of = knowledge_of
        self.second_id = second_id
        self.max_depth = max_depth
        self.cascades = cascades
        self._asked = 0  # depth of the first drafter's trees in the last step
        self._pools: list[CandidatePool] = []
        self._kept: list[Candidates] = []
        self._guesses: list[Candidates] = []
        self.set_sampling(sampling)

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.first.lengths

    @property
    def is_sampled(self) -> bool:
        return self.first.is_sampled

    def advance(self, committed: Committed) -> None:
        self.first.advance(committed)
        self.second.advance(committed)

    def propose(self, budget: Budget, random: StepRandom) -> DraftTree:
        depth = self.max_depth if budget.depth is None else min(budget.depth, self.max_depth)
        limit = Budget(min(budget.num_nodes, self.num_nodes), depth)
        if min(limit.num_nodes, depth) < 1:
            self._pools, self._kept = [], []
            return self.first.propose(Budget(0), random)
        indices = range(len(self.lengths))
        self._guesses = [
            self.second.draft_below(index, [], limit.num_nodes, depth) for index in indices
        ]
        tree = self.first.propose(self._share(limit), random)
        self._asked = tree.max_depth if len(tree.score[0]) else 0
        scores = tree.score.tolist()
        trees, _ = tree.to_host()
        self._pools = [self._pool(index, trees[index], scores[index], depth) for index in indices]
        self._kept = [self._best(pool, limit.num_nodes) for pool in self._pools]
        return mixed_tree(self._kept, tree)

    def on_verified(self, result: VerifyResult) -> None:
        """Learn which candidates, even if they were not verified, match the emitted tokens."""
        if result.base_length != list(self.lengths) or not self._kept:
            return  # This step had no drafts; its tokens arrive with the next `advance`.
        for index, (pool, kept) in enumerate(zip(self._pools, self._kept, strict=True)):
            if index in result.failed:
                continue
            accepted = kept.token_ids[result.path[index]].tolist()
            emitted = [*accepted, result.next_token[index]]
            self.knowledge.learn(pool, emitted)
            guess = self._guesses[index]
            sampled = [node for node in pool.follow(emitted) if node < pool.num_first]
            if self.cascade is not None:
                self.cascade.learn(guess, self._asked, len(sampled), emitted)
            if self.is_sampled:
                self.knowledge.sampled.learn(pool.first, sampled)

    def on_finished(self, index: int, token_ids: Sequence[int]) -> None:
        """Pass a complete sequence to the second drafter, which learns from it."""
        self.second.on_finished(index, token_ids)

    def rollback(self, length: int) -> None:
        """Discard the tokens from position `length` on, but not what was learned from them."""
        self.first.rollback(length)
        self.second.rollback(length)
        self._pools, self._kept = [], []

    def select_sequences(self, indices: Sequence[int]) -> None:
        self.first.select_sequences(indices)
        self.second.select_sequences(indices)
        self._pools, self._kept = [], []

    def append_sequences(self, other: DraftSession) -> None:
        """Add the sequences of another session of the same drafters."""
        assert isinstance(other, CombinedSession)
        self.first.append_sequences(other.first)
        self.second.append_sequences(other.second)
        self._pools, self._kept = [], []

    def set_sampling(self, sampling: Sampling) -> None:
        self.first.set_sampling(sampling)
        self.second.set_sampling(sampling)
        self.shape = self.first.shape
        self.num_nodes = self.settings.num_nodes or self.shape.max_nodes
        self.knowledge = self.knowledge_of(sampling.do_sample, self.shape)
        self.cascade: Cascade | None = None
        if self.cascades is not None:
            self.cascade = self.cascades.of(sampling.do_sample, self.shape)

    def reserve(self, capacity: int) -> None:
        self.first.reserve(capacity)
        self.second.reserve(capacity)

    def clear_unused(self) -> None:
        self.first.clear_unused()
        self.second.clear_unused()

    def close(self) -> None:
        self.first.close()
        self.second.close()

    def _share(self, limit: Budget) -> Budget:
        """Return the budget of the first drafter.

        If candidates are not sampled, the first drafter gets the whole budget, because the best
        candidates of both drafters are selected later.
        """
        if self.cascade is not None:
            depth = self.cascade.choose(self._guesses, limit)
            if depth == 0:
                return Budget(0)
            limit = Budget(limit.num_nodes, depth)
        if not self.is_sampled:
            return limit
        gains = [self.knowledge.gains(guess) for guess in self._guesses]
        share = sampled_budget(self.knowledge.sampled, self.shape, limit, gains)
        return Budget(share, limit.depth)

    def _pool(
        self, index: int, tree: SequenceTree, scores: list[float], depth: int
    ) -> CandidatePool:
        """Return the candidates of both drafters for a sequence."""
        pool = CandidatePool(tree, scores)
        pool.graft(ROOT, self._guesses[index], depth)
        for anchor in self._anchors(pool, depth):
            left = depth - pool.depths[anchor]
            nodes = self.settings.graft_nodes
            guess = self.second.draft_below(index, pool.path(anchor), nodes, left)
            pool.graft(anchor, guess, depth)
        return pool

    def _best(self, pool: CandidatePool, num_nodes: int) -> Candidates:
        """Return the candidates of a sequence to verify, including all sampled candidates."""
        values = pool.values(self.knowledge.candidates)
        is_first = np.arange(len(values)) < pool.num_first
        if self.is_sampled:
            others = pool.best(values, num_nodes - pool.num_first, ~is_first)
            nodes = np.concatenate((np.flatnonzero(is_first), others))
        else:
            nodes = pool.best(values, num_nodes, np.ones_like(is_first))
        return pool.kept(values, nodes, self.second_id, is_sampled=self.is_sampled)

    def _anchors(self, pool: CandidatePool, depth: int) -> list[int]:
        """Return the most likely nodes that only the first drafter proposes.

        The second drafter continues these nodes.
        """
        values = pool.values(self.knowledge.candidates)
        nodes = [
            node
            for node in range(pool.num_first)
            if pool.is_valid[node] and pool.sources[node] == FIRST and pool.depths[node] < depth
        ]
        nodes.sort(key=lambda node: -values[node])
        return nodes[: self.settings.grafts]
