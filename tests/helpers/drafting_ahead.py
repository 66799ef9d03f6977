"""Exact enumeration of two decoding steps, of which the second one's tree may be drafted ahead.

The code of `AheadRun` is the real one. Random tables stand in for the networks of target and
drafter, and a chooser makes all random choices.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from math import prod
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from helpers.branching import Chooser, distribution_of
from helpers.models import tiny_llama
from helpers.remote import tensors
from helpers.tables import Prefix, Tables, logits_in_tree, no_processors, one_by_one
from torch import Tensor
from transformers import StoppingCriteriaList

from inference.ahead import AheadDecoder, AheadRun
from inference.draft_tree import ROOT, DraftTree, SequenceTree
from inference.engine import acceptance
from inference.engine.accept import accept_path
from inference.engine.acceptance import AcceptResult, ProcessedDistribution
from inference.engine.request import Request, StopRule
from inference.protocol import Budget, Committed, Drafter, DraftSession
from inference.remote.tree_frame import to_draft_tree
from inference.sampling.integer_distribution import quantized
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import ACCEPTING, DRAFTING, StepRandom, StreamKey

START: Prefix = (0, 1)  # with which the enumeration of `error_of_two_steps` begins
CHILDREN = 2


class NumbersOfVerdict(StepRandom):
    """The numbers by which a step accepts candidates, as noise of the next tree; for a fault."""

    def __init__(self, keys: Sequence[StreamKey], *others: Any) -> None:
        super().__init__([(*key[:-1], key[-1] - 1) for key in keys], *others)

    def exponentials(self, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Return the numbers, transformed to the exponential distribution."""
        sizes = [prod(shape) for shape in shapes]
        levels = (-torch.log1p(-self.uniforms(sum(sizes)))).split(sizes, dim=1)
        return [level.unflatten(1, shape) for level, shape in zip(levels, shapes, strict=True)]


class _Uniform:
    """A uniform random number, known only as far as the choices made with it reveal it."""

    def __init__(self) -> None:
        self.low, self.high = 0.0, 1.0

    def select(self, chooser: Chooser, probs: Sequence[float]) -> int:
        """Return the index that the number selects by inversion."""
        bounds = np.array([0.0, *np.cumsum(probs)[:-1], 1.0]).clip(self.low, self.high)
        shares = np.diff(bounds) / (self.high - self.low)
        found = chooser.choose(shares.tolist())
        self.low, self.high = float(bounds[found]), float(bounds[found + 1])
        return found


class _Numbers:
    """All random numbers of one run of the experiment, by step, stream and index."""

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser
        self._known: defaultdict[tuple[StreamKey, int, int], _Uniform] = defaultdict(_Uniform)

    def columns(self, random: StepRandom, probs: np.ndarray, num_columns: int) -> list[int]:
        """Return columns of a draft distribution, sampled without replacement."""
        (key,) = random._keys
        stream = ACCEPTING if isinstance(random, NumbersOfVerdict) else DRAFTING
        left, found = probs.copy(), list[int]()
        for index in range(num_columns):
            number = self._known[key, stream, index]
            found.append(number.select(self._chooser, (left / left.sum()).tolist()))
            left[found[-1]] = 0
        return found

    def verdict(
        self, tree: SequenceTree, distribution: ProcessedDistribution, uniforms: object = None
    ) -> AcceptResult:
        """Return the outcome of the first step."""
        key = distribution.sampling.stream_key(1)
        numbers = (self._known[key, ACCEPTING, index] for index in count())

        def is_accepted(probability: float) -> bool:
            return next(numbers).select(self._chooser, [probability, 1 - probability]) == 0

        path, probs = accept_path(tree, distribution, is_accepted)
        token = next(numbers).select(self._chooser, probs.tolist())
        return AcceptResult(tree, path, token, distribution)


class _TableDrafter(Drafter):
    """A drafter of sampled children of the root."""

    numbers: _Numbers
    max_nodes, max_depth = CHILDREN, 1

    def __init__(self, tables: Tables, support: int) -> None:
        self.tables, self.support = tables, support

    def new_session(self, sampling: Sampling, capacity: int, batch: int = 1) -> DraftSession:
        """Return a session for one sequence."""
        return _TableSession(self)

    def tree(self, prefix: Prefix, num_nodes: int, random: StepRandom) -> DraftTree:
        """Return a tree below the last token of a prefix."""
        best = self.tables.joint(prefix)[0].softmax(dim=-1).topk(self.support)
        ids, weights = best.indices.tolist(), quantized(best.values.numpy())
        columns = self.numbers.columns(random, weights / weights.sum(), num_nodes)
        distribution = dict(zip(ids, weights.tolist(), strict=True))
        parents = [ROOT] * num_nodes
        found = tensors([ids[column] for column in columns], parents, {ROOT: distribution})
        tree = to_draft_tree(found, torch.tensor([len(prefix) - 1]))
        return replace(tree, score=torch.tensor([weights[columns].tolist()]).log())


class _TableSession(DraftSession):
    """The tokens of one sequence; like the session of a small model, it ignores known lengths."""

    def __init__(self, drafter: _TableDrafter) -> None:
        self._drafter = drafter
        self._token_ids: list[int] = []  # verified tokens, then the root
        self._length, self._has_root = 0, False

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of verified tokens."""
        return (self._length,)

    @property
    def is_sampled(self) -> bool:
        """Whether candidates are sampled."""
        return True

    def advance(self, committed: Committed) -> None:
        """Add verified tokens and the root, unless a root at this position is known."""
        (end,), (num_verified,) = committed.base_length, committed.num_verified
        if self._has_root and end == self._length:
            return
        assert end - num_verified == self._length
        added = [*committed.token_ids[0].tolist(), *committed.root[0].tolist()]
        self._token_ids[self._length :] = added
        self._length, self._has_root = end, True

    def propose(self, budget: Budget, random: StepRandom) -> DraftTree:
        """Return a tree below the root."""
        assert self._has_root
        assert len(self._token_ids) == self._length + 1
        num_nodes = min(CHILDREN, budget.num_nodes)
        return self._drafter.tree(tuple(self._token_ids), num_nodes, random)

    def rollback(self, length: int) -> None:
        """Discard the tokens from position `length` on."""
        self._length, self._has_root = min(self._length, length), False

    def select_sequences(self, indices: Sequence[int]) -> None:
        """Keep the only sequence."""
        assert list(indices) == [0]


class TableRun(AheadRun):
    """A run whose target is tables."""

    drafter: _TableDrafter

    def begin(self, prefix: Prefix) -> None:
        """Start after a prefix, whose last token is the root, without reading it."""
        (state,) = self.live = list(self.sequences)
        state.token_ids = list(prefix)
        self.context.lengths = [len(prefix) - 1]

    def outcome(self, tree: SequenceTree) -> tuple[list[int], int]:
        """Return the accepted path of this step and the next token, before they are accepted."""
        (state,) = self.live
        logits = self._logits(tree)
        own = ProcessedDistribution(logits, state.token_ids, tree, state.request.sampling)
        result = self.drafter.numbers.verdict(tree, own)
        return result.path, result.next_token

    def _target_logits(self, tree: DraftTree) -> Tensor:
        self.context.roots([state.token_ids for state in self.live])  # which a commit reads
        return self._logits(tree.sequence_tree())[None]

    def _logits(self, tree: SequenceTree) -> Tensor:
        (state,) = self.live
        return logits_in_tree(self.drafter.tables, tuple(state.token_ids), tree)


class AheadSteps:
    """The exact distribution of two steps, of which the second one's tree may be drafted ahead."""

    def __init__(self, tables: Tables, support: int = 2) -> None:
        self.tables = tables
        self.drafter = _TableDrafter(tables, support)
        target = tiny_llama(vocab=tables.vocab, num_hidden_layers=1)
        self.decoder = AheadDecoder(target, self.drafter, tree="fixed")

    def __call__(self, prefix: Prefix) -> dict[Prefix, float]:
        """Return the distribution of the tokens of both steps; no tokens after these steps."""
        if len(prefix) > len(START):
            return {(): 1.0}
        trees: list[DraftTree] = []

        def first_step(chooser: Chooser) -> tuple[Prefix, int]:
            emitted, tree = self._first_step(chooser, prefix)
            trees.append(tree)
            return emitted, len(trees) - 1

        total: defaultdict[Prefix, float] = defaultdict(float)
        for (first, index), probability in distribution_of(first_step).items():
            second = one_by_one(self.tables, no_processors(), prefix + first, trees[index])
            for then, share in second.items():
                total[first + then] += probability * share
        return dict(total)

    @torch.inference_mode()
    def _first_step(self, chooser: Chooser, prefix: Prefix) -> tuple[Prefix, DraftTree]:
        """Return the tokens of the first step, and the tree of the second one."""
        self.drafter.numbers = _Numbers(chooser)
        stop = StopRule(StoppingCriteriaList(), torch.device("cpu"))
        request = Request(list(prefix), no_processors(), stop, max_length=16)
        parts = {"target": self.decoder.target, "drafter": self.drafter}
        run = TableRun(self.decoder, requests=request, **parts)
        try:
            run.begin(prefix)
            (state,) = run.live
            with patch.object(acceptance, "_on_host", self.drafter.numbers.verdict):
                (step,) = run.step()
            state.num_steps += 1
            tree = run._draft(StepRandom([state.stream_key]), run.next_budget())
        finally:
            run.close()
        return tuple(step.token_ids), tree
