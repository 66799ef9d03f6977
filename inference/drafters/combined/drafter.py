"""A combination of two drafters in one tree: a model, and a training-free drafter.

The number of sampled nodes is fixed before sampling, so that acceptance stays exact.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from torch.nn.functional import pad

from inference.draft_tree import ROOT, DraftTree, SequenceTree
from inference.drafters.aded.drafter import AdedDrafter
from inference.drafters.base import TokenSession
from inference.drafters.candidates import Candidates, to_tree
from inference.drafters.combined.cascade import Cascade, DraftCosts
from inference.drafters.combined.knowledge import (
    FIRST,
    CandidatePool,
    CombinedSettings,
    Knowledge,
    sampled_budget,
)
from inference.drafters.delegating import DelegatingDrafter
from inference.drafters.lookup import LookupDrafter
from inference.drafters.small_lm import SmallLMDrafter, SmallLMSession
from inference.drafters.trained.drafter import TrainedDrafter, TrainedSession
from inference.protocol import (
    AdaptiveDrafter,
    AdaptiveSession,
    Budget,
    Committed,
    CostAware,
    DraftSession,
    RequestCounter,
)
from inference.sampling.grammar import GrammarProcessor
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import StepRandom
from inference.trees.shape import TreeShape


class CombinedDrafter(DelegatingDrafter, CostAware):
    """Drafter that combines a model and a training-free drafter in shared trees; thread-safe.

    The proposer ids of candidates are those of the first drafter, plus one id for candidates that
    only the second drafter proposes.

    Example:
        first = SmallLMDrafter(small_lm, target)
        drafter = CombinedDrafter(first, LookupDrafter())
        output = SpeculativeDecoder(target, drafter, tokenizer).generate("a b a", max_new_tokens=16)
    """

    def __init__(
        self,
        first: TrainedDrafter | SmallLMDrafter,
        second: AdedDrafter | LookupDrafter,
        settings: CombinedSettings | None = None,
    ) -> None:
        super().__init__(first)
        self.first, self.second = first, second
        self.settings = settings or CombinedSettings()
        # Costs and rates of a decoder, by which the first drafter drafts only where it saves time.
        self._costs: DraftCosts | None = None
        self._cascades: dict[tuple[bool, TreeShape], Cascade] = {}
        # If other decoders also use the second drafter, they share its request counter.
        self._counter = second.request_counter or RequestCounter()
        self.request_counter = self._counter
        self.bytes_per_token = first.bytes_per_token + second.bytes_per_token
        self.second_id = 1
        if isinstance(first, TrainedDrafter):
            self.second_id = first.model.config.settings.experts.num_active
        self.proposer_names = (*first.proposer_names, *second.proposer_names)
        self._knowledge: dict[tuple[bool, TreeShape, int], Knowledge] = {}

    @property
    def slow_part(self) -> TrainedDrafter | SmallLMDrafter:
        return self.first

    def use_costs(
        self, verify: Callable[[int], float], draft: Mapping[int, float]
    ) -> Callable[[], None]:
        self._costs, self._cascades = DraftCosts(verify, draft), {}
        return self._cascades.clear

    def cascade(self, do_sample: bool, shape: TreeShape) -> Cascade | None:
        """Return the choice of depths for trees of one shape; None if the first always drafts."""
        if self._costs is None:
            return None
        return self._cascades.setdefault((do_sample, shape), Cascade(shape, self._costs))

    @property
    def max_nodes(self) -> int:
        return self.settings.num_nodes or self.first.max_nodes

    @property
    def max_depth(self) -> int:
        return max(self.first.max_depth, self.second.max_depth)

    def new_session(self, sampling: Sampling, capacity: int, batch: int = 1) -> "CombinedSession":
        return CombinedSession(self, sampling, capacity, batch)

    def can_share(self, one: Sampling, other: Sampling) -> bool:
        """Return whether both share the first drafter's sessions and the learned statistics."""
        return one.do_sample == other.do_sample and self.first.can_share(one, other)

    def knowledge(self, do_sample: bool, shape: TreeShape) -> Knowledge:
        """Return the statistics for greedy decoding or sampling with trees of one shape.

        They start anew after a reset, also of the second drafter alone.
        """
        key = do_sample, shape, self._counter.num_resets
        return self._knowledge.setdefault(key, Knowledge(shape))

    def reset(self) -> None:
        self._knowledge.clear()
        if isinstance(self.second, AdaptiveDrafter):
            self.second.reset()
        else:
            self._counter.reset()


class CombinedSession(AdaptiveSession):
    def __init__(
        self, drafter: CombinedDrafter, sampling: Sampling, capacity: int, batch: int
    ) -> None:
        self.drafter, self.settings = drafter, drafter.settings
        self.first: TrainedSession | SmallLMSession
        self.first = drafter.first.new_session(sampling, capacity, batch)
        self.second: TokenSession = drafter.second.new_session(sampling, capacity, batch)
        self._asked = 0  # depth of the first drafter's trees in the last step
        self._pools: list[CandidatePool] = []  # of the last trees, until their outcome is known
        self._guesses: list[Candidates] = []
        self.set_sampling(sampling)

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.first.lengths

    @property
    def is_sampled(self) -> bool:
        return self.first.is_sampled

    def advance(self, committed: Committed) -> None:
        before = self.lengths
        self.first.advance(committed)
        self.second.advance(committed)
        if self._pools and self.lengths != before:
            self._learn(before)

    def propose(self, budget: Budget, random: StepRandom) -> DraftTree:
        # After a reset, also sessions that are open begin anew.
        self.knowledge = self.drafter.knowledge(self._do_sample, self.shape)
        deepest = self.drafter.max_depth
        depth = deepest if budget.depth is None else min(budget.depth, deepest)
        limit = Budget(min(budget.num_nodes, self.num_nodes), depth)
        if min(limit.num_nodes, depth) < 1:
            self._pools = []
            return self.first.propose(Budget(0), random)
        indices = range(len(self.lengths))
        self._guesses = [
            self.second.draft_below(index, [], limit.num_nodes, depth) for index in indices
        ]
        tree = self.first.propose(self._share(limit), random)
        self._asked = tree.max_depth if len(tree.score[0]) else 0
        scores = tree.score.tolist()
        trees = tree.to_host()
        self._pools = [self._pool(index, trees[index], scores[index], depth) for index in indices]
        return mixed_tree([self._best(pool, limit.num_nodes) for pool in self._pools], tree)

    def _learn(self, roots: Sequence[int]) -> None:
        """Learn which candidates, even if they were not verified, match the tokens after roots."""
        for index, (root, pool) in enumerate(zip(roots, self._pools, strict=True)):
            emitted = self.second.known(index)[root + 1 :].tolist()
            self.knowledge.learn(pool, emitted)
            sampled = [node for node in pool.follow(emitted) if node < pool.num_first]
            if self.cascade is not None:
                self.cascade.learn(self._guesses[index], self._asked, len(sampled), emitted)
            if self.is_sampled:
                self.knowledge.sampled.learn(pool.first, sampled)
        self._pools = []

    def on_finished(self, index: int, token_ids: Sequence[int]) -> None:
        self.second.on_finished(index, token_ids)

    def rollback(self, length: int) -> None:
        self.first.rollback(length)
        self.second.rollback(length)
        self._pools = []

    def select_sequences(self, indices: Sequence[int]) -> None:
        self.first.select_sequences(indices)
        self.second.select_sequences(indices)
        if self._pools:
            self._pools = [self._pools[index] for index in indices]
            self._guesses = [self._guesses[index] for index in indices]

    def append_sequences(self, other: DraftSession) -> None:
        assert isinstance(other, CombinedSession)
        self.first.append_sequences(other.first)
        self.second.append_sequences(other.second)
        self._pools = []

    def set_sampling(self, sampling: Sampling) -> None:
        self.first.set_sampling(sampling)
        self.second.set_sampling(sampling)
        self.shape = self.first.shape
        self.num_nodes = self.settings.num_nodes or self.shape.max_nodes
        self._do_sample = sampling.do_sample
        self.knowledge = self.drafter.knowledge(self._do_sample, self.shape)
        self.cascade = self.drafter.cascade(sampling.do_sample, self.shape)

    def constrain(self, grammars: Sequence[GrammarProcessor | None]) -> None:
        self.first.constrain(grammars)
        self.second.constrain(grammars)

    def reserve(self, capacity: int) -> None:
        self.first.reserve(capacity)
        self.second.reserve(capacity)

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
        return pool.kept(values, nodes, self.drafter.second_id, is_sampled=self.is_sampled)

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


def mixed_tree(kept: Sequence[Candidates], first: DraftTree) -> DraftTree:
    """Return trees with the candidates of both drafters.

    Args:
        kept: candidates to verify, for each sequence, all sampled candidates first.
    """
    probs = first.draft_probs
    if probs is not None:  # nothing is sampled below the candidates of the second drafter
        more = max(len(part.token_ids) for part in kept) + 1 - probs.ids.shape[1]
        probs = probs.each(lambda part: pad(part, (0, 0, 0, more)))
    return to_tree(kept, first.base_length, probs)
