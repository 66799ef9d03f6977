"""A decoding step on the device, which is recorded as a CUDA graph for each size of trees."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from inference.draft_tree import DraftTree
from inference.engine.acceptance import accept_on_device, outcome_of
from inference.engine.context import Context
from inference.engine.cuda_graph import FixedRandom, RecordedFunction
from inference.protocol import Budget, DeviceSession
from inference.sampling.batch import BatchSampling
from inference.sampling.random_numbers import StreamKey


class Rows(NamedTuple):
    """The state of the first sequences, on the device, at the same addresses in all steps."""

    base_length: Int[Tensor, " batch"]
    roots: Int[Tensor, "batch 1"]
    is_live: Bool[Tensor, " batch"]  # False for sequences that only fill the batch
    temperatures: Float[Tensor, " batch"]

    def first(self, count: int) -> "Rows":
        return Rows(*(tensor[:count] for tensor in self))


class UnreadStep(NamedTuple):
    """A step that was started, and whose outcome the host has not read yet."""

    tree: DraftTree
    logits: Tensor  # without values on a GPU, where the next step may overwrite them
    outcome: Int[Tensor, "batch fields"]  # copied to the host
    is_copied: torch.cuda.Event | None  # None on a CPU
    keys: tuple[StreamKey, ...]  # keys of the random numbers of each sequence
    budget: Budget | None  # limits of the trees; None for a step without drafts


class DeviceBatch(NamedTuple):
    """The sequences of a step, with those that only fill the batch.

    Attributes:
        highest: upper bound of the positions of the roots.
    """

    context: Context
    rows: Rows
    sampling: BatchSampling
    highest: int

    def follow(self) -> None:
        """Give context and session upper bounds of the lengths, and the lengths on the device."""
        base_length, roots, *_ = self.rows
        lengths = (self.highest,) * len(roots)
        self.context.follow(lengths, base_length, roots)
        if isinstance(self.context.session, DeviceSession):
            self.context.session.follow(lengths, base_length, roots)


class RecordedStep:
    def __init__(self, batch: DeviceBatch, budget: Budget | None, pool: Any) -> None:
        self._batch, self._budget = batch, budget
        device = batch.context.target.device
        self._random = FixedRandom(device, batch.context.most_queries)
        state = batch.rows[:2]  # base_length and roots
        self._run = RecordedFunction(self._step, state, device, pool)
        self._tree: DraftTree | None = None
        self._logits: Tensor | None = None

    def start(self, keys: Sequence[StreamKey]) -> UnreadStep:
        num_filling = len(self._batch.rows.roots) - len(keys)
        self._random.replace([*keys, *[keys[0]] * num_filling])
        outcome = self._run()
        assert self._tree is not None
        assert self._logits is not None
        is_copied = None
        if outcome.is_cuda:
            device = outcome.device
            outcome, is_copied = outcome.to("cpu", non_blocking=True), torch.cuda.Event()
            is_copied.record(torch.cuda.current_stream(device))
        return UnreadStep(self._tree, self._logits, outcome, is_copied, tuple(keys), self._budget)

    def _step(self) -> Int[Tensor, "batch fields"]:
        batch, context, rows = self._batch, self._batch.context, self._batch.rows
        batch.follow()
        target, tree = context.target, self._draft()
        step = tree.to_step(rows.roots, target.spec, batch.highest, None)
        logits = target.logits(target.forward(step, context.cache).features)
        accepted = accept_on_device(tree, logits, batch.sampling, self._random, range(len(logits)))
        context.commit_on_device(tree, accepted.path, accepted.next_token)
        rows.base_length.copy_(context.base_length.where(rows.is_live, rows.base_length))
        rows.roots.copy_(context.roots([]))
        # Recorded functions share memory, except what is referenced.
        self._logits = logits.new_zeros(()).expand_as(logits) if logits.is_cuda else logits
        self._tree = replace(tree, draft_probs=None) if logits.is_cuda else tree
        return outcome_of(tree, accepted)

    def _draft(self) -> DraftTree:
        context, base_length = self._batch.context, self._batch.rows.base_length
        if context.session is None or self._budget is None:
            return DraftTree.empty(base_length)
        tree = context.session.propose(self._budget, self._random)
        return tree.limited(context.target.spec.max_position - 1)
