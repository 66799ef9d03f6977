"""The two parts of a decoding step on the device, each of which is recorded as a CUDA graph.

The first part drafts, and is recorded for each size of trees. The second part verifies, accepts and
commits. It is recorded for each `TreeForm`, so trees of several sizes share a recording.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from inference.draft_tree import DraftTree
from inference.engine.acceptance import accept_on_device, outcome_of
from inference.engine.buffers import FixedRandom, HostBuffers, TreeBuffer, TreeForm
from inference.engine.context import Context
from inference.engine.cuda_graph import GraphMemory, RecordedFunction
from inference.protocol import Budget, DeviceSession
from inference.sampling.batch import BatchSampling
from inference.sampling.random_numbers import StepRandom, StreamKey


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

    @property
    def is_sampled(self) -> bool:
        """Whether tokens are sampled, which is the same for all sequences."""
        return self.sampling.each[0].do_sample

    @property
    def greedy_depth(self) -> int | None:
        """The largest depth of trees in greedy decoding; None in sampling."""
        drafter = self.context.drafter
        return None if self.is_sampled or drafter is None else drafter.max_depth

    def follow(self) -> None:
        """Give context and session upper bounds of the lengths, and the lengths on the device."""
        base_length, roots, *_ = self.rows
        lengths = (self.highest,) * len(roots)
        self.context.follow(lengths, base_length, roots)
        if isinstance(self.context.session, DeviceSession):
            self.context.session.follow(lengths, base_length, roots)


class DraftPart:
    """The first part of a step: trees of one size, and the random numbers of the step."""

    def __init__(
        self,
        batch: DeviceBatch,
        budget: Budget | None,
        buffers: dict[TreeForm, TreeBuffer],
        memory: GraphMemory,
    ) -> None:
        self._batch, self._budget = batch, budget
        device = batch.context.target.device
        self._random = FixedRandom(device, batch.context.most_queries)
        self._run = RecordedFunction(self._draft, (), device, memory)
        self._buffers = buffers
        self._form: TreeForm | None = None  # known after the first trees

    def start(self, keys: Sequence[StreamKey]) -> TreeBuffer:
        """Start to draft trees, and return the buffer that will contain them."""
        num_filling = len(self._batch.rows.roots) - len(keys)
        self._random.replace([*keys, *[keys[0]] * num_filling])
        if self._form is None:
            self._form = self._prepared()
        if self._batch.is_sampled or self._form.num_queries > 1:
            self._run()
        return self._buffers[self._form]

    def _prepared(self) -> TreeForm:
        """Draft once, to allocate what recorded functions refer to, and return the trees' form."""
        tree = self._tree()
        form = TreeForm.of(tree, self._batch.greedy_depth)
        if form not in self._buffers:
            probs = None if tree.draft_probs is None else tree.draft_probs.probs
            self._buffers[form] = TreeBuffer(form, self._batch.rows.base_length, probs)
        if self._batch.is_sampled:
            self._random.uniforms(form.num_queries)
        return form

    def _draft(self) -> Tensor:
        assert self._form is not None
        buffer = self._buffers[self._form]
        filled = buffer.fill(self._tree())
        if self._batch.is_sampled:
            buffer.uniforms.copy_(self._random.uniforms(self._form.num_queries))
        return filled

    def _tree(self) -> DraftTree:
        self._batch.follow()
        context, base_length = self._batch.context, self._batch.rows.base_length
        if context.session is None or self._budget is None:
            return DraftTree.empty(base_length)
        tree = context.session.propose(self._budget, self._random)
        return tree.limited(context.target.spec.max_position - 1)


class VerifyPart:
    """The second part of a step: verification, acceptance and commit of trees of one form."""

    def __init__(self, batch: DeviceBatch, buffer: TreeBuffer, memory: GraphMemory) -> None:
        self._batch, self._buffer = batch, buffer
        state = (batch.rows.base_length, batch.rows.roots)
        device = batch.context.target.device
        self._run = RecordedFunction(self._verify, state, device, memory)
        self._tree: DraftTree | None = None
        self._logits: Tensor | None = None
        self._hosts: HostBuffers | None = None

    def start(self, keys: Sequence[StreamKey], budget: Budget | None) -> UnreadStep:
        """Start the verification, and the copy of its outcome to the host."""
        outcome = self._run()
        assert self._tree is not None
        assert self._logits is not None
        is_copied = None
        if outcome.is_cuda:
            self._hosts = self._hosts or HostBuffers(outcome, outcome.device)
            outcome, is_copied = self._hosts.download(outcome)
        return UnreadStep(self._tree, self._logits, outcome, is_copied, tuple(keys), budget)

    def _verify(self) -> Int[Tensor, "batch fields"]:
        self._batch.follow()
        context, rows = self._batch.context, self._batch.rows
        target, tree = context.target, self._buffer.tree
        step = tree.to_step(rows.roots, target.spec, self._batch.highest, None)
        logits = target.logits(target.forward(step, context.cache).features)
        random = StepRandom.of(self._buffer.uniforms)
        every = range(len(logits))
        accepted = accept_on_device(tree, logits, self._batch.sampling, random, every)
        context.commit_on_device(tree, accepted.path, accepted.next_token)
        rows.base_length.copy_(context.base_length.where(rows.is_live, rows.base_length))
        rows.roots.copy_(context.roots([]))
        # Recorded functions share memory, except what is referenced.
        self._logits = logits.new_zeros(()).expand_as(logits) if logits.is_cuda else logits
        self._tree = tree
        return outcome_of(tree, accepted)
