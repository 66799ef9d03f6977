"""The session of two drafters that share one tree for each sequence."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn.functional import pad

from inference.draft_tree import (
    ROOT,
    CandidateKind,
    DraftTree,
    SequenceTree,
    SparseDistribution,
)
from inference.drafters.base import TokenSession
from inference.drafters.candidates import Candidates
from inference.drafters.combined.cascade import Cascade, Cascades
from inference.drafters.combined.knowledge import CombinedSettings, Knowledge, sampled_budget
from inference.drafters.combined.pool import FIRST, CandidatePool
from inference.drafters.small_lm import SmallLMSession
from inference.drafters.trained.drafter import TrainedSession
from inference.protocol import AdaptiveSession, Budget, Committed, DraftSession, VerifyResult
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import StepRandom
from inference.trees.shape import TreeShape


def mixed_tree(
    pools: Sequence[CandidatePool], kept: Sequence[Candidates], first: DraftTree
) -> DraftTree:
    """Return trees with the candidates of both drafters.

    Args:
        kept: candidates to verify, for each sequence. They must include all sampled candidates, and
            the column `origin` must contain their nodes in the pool.
    """
    count = max(len(own.token_ids) for own in kept)
    if count == 0:
        return DraftTree.empty(first.base_length, first.step_id)
    is_sampled = first.draft_probs is not None
    pairs = list(zip(pools, kept, strict=True))
    columns = np.stack([_columns(pool, own, is_sampled, count) for pool, own in pairs], axis=1)
    score = np.stack([_scores(own, count) for own in kept])
    device = first.base_length.device
    token_ids, parent, depth, kind, rank, proposer_id, is_valid = (
        torch.from_numpy(columns).to(device).unbind()
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
        max_siblings=max(int(np.bincount(parents + 1).max()) for parents in columns[1]),
        step_id=first.step_id,
        draft_probs=_padded(first.draft_probs, count),
    )


def _columns(
    pool: CandidatePool, kept: Candidates, is_sampled: bool, count: int
) -> Int64[np.ndarray, "fields nodes"]:
    """Return token, parent, depth, kind, rank, proposer and validity; padding has parent ROOT."""
    assert kept.origin is not None
    assert kept.source is not None
    sampled = (kept.origin < pool.num_first) & is_sampled
    fields = np.zeros((7, count), np.int64)
    fields[1], fields[2] = ROOT, 1
    own = fields[:, : len(kept.token_ids)]
    own[0], own[1], own[2] = kept.token_ids, kept.parents, kept.depths
    own[3] = np.where(sampled, int(CandidateKind.SAMPLED), int(CandidateKind.DETERMINISTIC))
    own[4] = _ranks(pool, kept, sampled)
    own[5] = kept.source
    own[6] = np.array(pool.is_valid, np.int64)[kept.origin]
    return fields


def _ranks(
    pool: CandidatePool, kept: Candidates, sampled: Bool[np.ndarray, " kept"]
) -> Int64[np.ndarray, " kept"]:
    """Return the order of sampling of sampled candidates, and the rank by score of all others."""
    assert kept.origin is not None
    ranks = np.zeros(len(sampled), np.int64)
    ranks[sampled] = np.array(pool.first.rank, np.int64)[kept.origin[sampled]]
    others = np.flatnonzero(~sampled)
    order = np.argsort(-kept.scores[others], kind="stable")
    ranks[others[order]] = np.arange(len(others))
    return ranks


def _scores(kept: Candidates, count: int) -> Float[np.ndarray, " nodes"]:
    scores = np.full(count, -np.inf, np.float32)
    with np.errstate(divide="ignore"):
        scores[: len(kept.scores)] = np.log(kept.scores)
    return scores


def _padded(draft_probs: SparseDistribution | None, count: int) -> SparseDistribution | None:
    """Return the distributions below ROOT and `count` nodes, padded with zeros."""
    if draft_probs is None:
        return None
    more: int = count + 1 - draft_probs.ids.shape[1]

    def longer(values: Tensor) -> Tensor:
        return pad(values, (0, 0, 0, more))

    return SparseDistribution(longer(draft_probs.ids), longer(draft_probs.probs))


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
        return mixed_tree(self._pools, self._kept, tree)

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
                self.knowledge.learn_sampled(pool.first, pool, guess, sampled, emitted)

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
        return pool.kept(values, nodes, self.second_id)

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
