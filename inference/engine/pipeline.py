"""Decoding steps on the device, which start before the host has read the previous result.

A step drafts, verifies, accepts and commits without waiting for the host. On a GPU, it is recorded
as a CUDA graph. What a step has computed beyond the end of a sequence is discarded.
"""

from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from inference.draft_tree import DraftTree
from inference.engine.acceptance import AcceptResult, accept_on_device, outcome_of, read_results
from inference.engine.context import Context
from inference.engine.cuda_graph import GraphMemory, RecordedFunction
from inference.engine.request import SequenceState
from inference.engine.tree_step import tree_step
from inference.protocol import Budget, DeviceSession, Drafter
from inference.sampling.batch import BatchSampling
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import FixedRandom, StreamKey
from jakiro.errors import NumericalError
from jakiro.target.adapter import TargetAdapter

# Recorded steps read the slots of all positions up to a multiple of this number, so that few steps
# have to be recorded.
STRIDE = 2048
MOST_STEPS = 64  # largest number of recorded steps of a pipeline
# Number of tokens of a sequence that only fills a batch. Every token of it attends to some token,
# because attention to nothing may be NaN.
FILLED = 2


class _UnreadStep(NamedTuple):
    """A step that was started, and whose outcome the host has not read yet."""

    tree: DraftTree
    logits: Tensor
    outcome: Int[Tensor, "batch fields"]  # copied to the host
    is_copied: torch.cuda.Event | None  # None on a CPU


def recording_key(sampling: Sampling) -> tuple[bool, tuple[str, ...]]:
    """Return what recorded steps depend on; a single temperature can change between steps."""
    return sampling.form if len(sampling.temperatures) <= 1 else sampling.description


def batch_size_for(count: int) -> int:
    """Return the size of batches in which a number of sequences is decoded: a power of two."""
    return 1 << max(count - 1, 0).bit_length()


class _Rows(NamedTuple):
    """The state of the first sequences, on the device, at the same addresses in all steps."""

    base_length: Int[Tensor, " batch"]
    roots: Int[Tensor, "batch 1"]
    is_live: Bool[Tensor, " batch"]  # False for sequences that only fill the batch
    temperatures: Float[Tensor, " batch"]

    def first(self, count: int) -> "_Rows":
        """Return the state of the first `count` sequences."""
        return _Rows(*(tensor[:count] for tensor in self))


class Pipeline:
    """Decoding steps of the sequences of a context.

    A step may start before the host has read the result of the step before it. Until `stop`, the
    lengths in the context and its session are out of date.

    Batches are filled up to a power of two, or up to the number of sequences for which the context
    has room, so that few steps have to be recorded while sequences join and leave.

    Args:
        context: context of the sequences.
    """

    # Options of the sequences, and with those that only fill the batch.
    live_sampling: BatchSampling
    sampling: BatchSampling

    def __init__(self, context: Context) -> None:
        self.context = context
        count, device = context.num_rows, context.target.device
        lengths = torch.full((count,), FILLED, device=device)
        roots = torch.zeros_like(lengths)[:, None]
        is_live = torch.zeros_like(lengths, dtype=torch.bool)
        temperatures = torch.ones(count, dtype=torch.float64, device=device)
        self.rows = _Rows(lengths, roots, is_live, temperatures)
        self.memory = GraphMemory()
        self._tensors = _tensors_of(context)
        self._steps: dict[tuple[object, ...], _DeviceStep] = {}
        self._unread: _UnreadStep | None = None

    @property
    def is_valid(self) -> bool:
        """Whether the caches and weights are those that the recorded steps refer to."""
        return self._tensors == _tensors_of(self.context)

    def resume(self, sampling: Sequence[Sampling], token_ids: Sequence[list[int]]) -> None:
        """Prepare for steps; the context and its session must contain all tokens but the last.

        Args:
            sampling: options of each sequence, which must satisfy `never_waits`, and have the same
                `recording_key`.
            token_ids: all tokens of each sequence.
        """
        count = len(token_ids)
        live = self.rows.first(count)
        live.base_length.copy_(self.context.base_length)
        live.roots.copy_(self.context.roots(token_ids))
        if has_one_temperature := len(sampling[0].temperatures) == 1:
            each = [own.temperatures[0] for own in sampling]
            live.temperatures.copy_(torch.tensor(each, dtype=torch.float64))
        self.rows.base_length[count:] = FILLED
        self.rows.is_live[:count] = True
        self.rows.is_live[count:] = False
        size = min(batch_size_for(count), self.context.num_rows)
        self.live_sampling = BatchSampling(sampling)
        self.sampling = BatchSampling(
            [*sampling, *[sampling[0]] * (size - count)],
            self.rows.temperatures[:size] if has_one_temperature else None,
        )
        self.context.show_rows(self.sampling)

    @property
    def batch_size(self) -> int:
        """The number of sequences, with those that only fill the batch."""
        return len(self.sampling.each)

    @property
    def has_unread(self) -> bool:
        """Whether there is a step whose outcome has not been read."""
        return self._unread is not None

    @torch.inference_mode()
    def start(self, budget: Budget | None, keys: Sequence[StreamKey], longest: int) -> None:
        """Start the next step, after `take` has returned the previous one.

        Args:
            budget: limits of the trees; None for a step without drafts.
            keys: keys of the random numbers of each sequence.
            longest: upper bound of the number of cached tokens of a sequence.
        """
        assert self._unread is None
        # The last slot of a stride is the last one that a step reads.
        longest += self.context.most_queries
        strides = -(-min(longest, self.context.cache.capacity) // STRIDE)
        key = self.batch_size, budget, strides, recording_key(self.sampling.each[0])
        step = self._steps.pop(key, None) or _DeviceStep(
            self, budget, strides * STRIDE - self.context.most_queries
        )
        self._steps[key] = step  # the last one was used most recently
        if len(self._steps) > MOST_STEPS:
            del self._steps[next(iter(self._steps))]
        self._unread = step.start(keys)

    def take(self) -> "_UnreadStep":
        """Return the unread step, so that another one can be started before this one is read."""
        assert self._unread is not None
        unread, self._unread = self._unread, None
        return unread

    def read(self, unread: "_UnreadStep", sequences: Sequence[SequenceState]) -> list[AcceptResult]:
        """Wait for a step, and return the outcome of each sequence that is not finished.

        The outcome of a sequence is an error if the target's logits or the draft distributions are
        not valid. On a GPU, the next step may have overwritten them already, so that the error does
        not name the cause.

        Args:
            unread: step that `take` returned.
            sequences: all sequences of the step, without those that only fill the batch.
        """
        if unread.is_copied is not None:
            unread.is_copied.synchronize()
        running = [index for index, state in enumerate(sequences) if not state.is_finished]
        every = unread.outcome.tolist()
        outcome = [every[index] for index in running]
        is_sound = [bool(integers[-1]) for integers in outcome]
        if unread.is_copied is not None:  # the logits cannot explain an error any more
            outcome = [[*integers[:-1], 1] for integers in outcome]
        logits = [unread.logits[index] for index in running]
        states = [sequences[index] for index in running]
        results = read_results(unread.tree, outcome, logits, states, running)
        return [
            own if sound or own.error is not None else own._replace(path=[], error=_unsound())
            for own, sound in zip(results, is_sound, strict=True)
        ]

    def free(self) -> None:
        """Free the recorded steps and the context."""
        self.forget_steps()
        self.context.close()

    def forget_steps(self) -> None:
        """Free the recorded steps."""
        self._steps.clear()

    def stop(self, token_ids: Sequence[list[int]]) -> None:
        """Give the context its exact lengths again, and discard the unread step.

        Args:
            token_ids: all tokens of each sequence; the last one is the root.
        """
        self._unread = None
        self.context.show_rows(self.live_sampling)
        self.context.lengths = [len(ids) - 1 for ids in token_ids]
        if isinstance(self.context.session, DeviceSession):
            self.context.session.follow(
                tuple(self.context.lengths),
                self.context.base_length,
                self.context.roots(token_ids),
            )


class PipelinePool:
    """Unused pipelines, which are kept with their caches and recorded steps for later runs.

    Args:
        size: largest number of unused pipelines; the one that was used least recently is freed
            first.
    """

    def __init__(self, size: int = 2) -> None:
        self._size = size
        self._unused: list[Pipeline] = []
        self._lock = Lock()

    def take(
        self,
        target: TargetAdapter,
        drafter: Drafter | None,
        sampling: Sampling,
        batch: int,
        capacity: int,
    ) -> Pipeline:
        """Return a pipeline with an empty context.

        Args:
            target: frozen target.
            drafter: drafter of the trees; None to decode without drafts.
            sampling: options by which tokens are selected.
            batch: number of sequences.
            capacity: largest number of tokens of a sequence, without drafts.
        """
        target.modules.follow_changes()
        with self._lock:
            for index, pipeline in enumerate(self._unused):
                is_suitable = pipeline.context.fits(target, drafter, batch, capacity)
                if is_suitable and pipeline.is_valid:
                    del self._unused[index]
                    pipeline.context.restart(sampling, batch)
                    return pipeline
        strides, rows = capacity // STRIDE + 1, batch_size_for(batch)
        pipeline = Pipeline(Context(target, drafter, sampling, rows, strides * STRIDE))
        pipeline.context.select_sequences(range(batch))
        return pipeline

    def give(self, pipeline: Pipeline) -> None:
        """Keep a pipeline for later runs, or free its context if it cannot be used again.

        Args:
            pipeline: pipeline that is not in use any more.
        """
        removed = [pipeline]
        if pipeline.is_valid and pipeline.context.works_on_device:
            with self._lock:
                self._unused.insert(0, pipeline)
                removed = self._unused[self._size :]
                del self._unused[self._size :]
        for each in removed:
            each.free()


def _tensors_of(context: Context) -> tuple[object, ...]:
    """Return what changes if the caches or the weights of a context are replaced.

    These are the address of the first layer's keys, the size of the cache, and the address and the
    version of every weight of the target.
    """
    cache = context.cache
    weights = [(own.data_ptr(), own._version) for own in context.target.model.parameters()]
    keys = cache.slot_layers[0].keys
    return keys.data_ptr(), cache.num_rows, cache.capacity, tuple(weights)


class _DeviceStep:
    """A decoding step with trees of one shape, which reads a fixed number of slots.

    Args:
        pipeline: pipeline of the step.
        budget: limits of the trees; None for a step without drafts.
        highest: upper bound of the positions of the roots.
    """

    def __init__(self, pipeline: Pipeline, budget: Budget | None, highest: int) -> None:
        self.pipeline = pipeline
        self.rows = pipeline.rows.first(pipeline.batch_size)
        # The recorded step refers to tensors of the processors, and to the temperatures.
        self.sampling = pipeline.sampling
        self.budget = budget
        self.highest = highest
        self._tree: DraftTree | None = None
        self._logits: Tensor | None = None
        context = pipeline.context
        most_nodes = context.drafter.max_nodes if context.drafter else 0
        device = context.target.device
        self._random = FixedRandom(device, most_nodes + 1)
        state = (self.rows.base_length, self.rows.roots)
        self._run = RecordedFunction(self._decode, state, device, pipeline.memory)
        self._hosts: list[Tensor] = []  # two buffers, because one may be unread

    def start(self, keys: Sequence[StreamKey]) -> _UnreadStep:
        """Start the step, and the copy of its outcome to the host.

        Args:
            keys: keys of the random numbers of each sequence.
        """
        num_filling = len(self.rows.roots) - len(keys)
        self._random.replace([*keys, *[keys[0]] * num_filling])
        outcome = self._run()
        assert self._tree is not None
        assert self._logits is not None
        if not outcome.is_cuda:
            return _UnreadStep(self._tree, self._logits, outcome, None)
        if not self._hosts:
            self._hosts = [
                torch.empty(outcome.shape, dtype=outcome.dtype, pin_memory=True) for _ in range(2)
            ]
        self._hosts.reverse()
        self._hosts[0].copy_(outcome, non_blocking=True)
        is_copied = torch.cuda.Event()
        is_copied.record(torch.cuda.current_stream(outcome.device))
        return _UnreadStep(self._tree, self._logits, self._hosts[0], is_copied)

    def _decode(self) -> Int[Tensor, "batch fields"]:
        """Draft, verify, accept and commit, and return the outcome."""
        context = self.pipeline.context
        target = context.target
        tree = self._draft()
        step = tree_step(tree, self.rows.roots, target.spec, self.highest)
        logits = target.logits(target.forward(step, context.cache).features)
        every = range(len(logits))
        accepted = accept_on_device(tree, logits, self.sampling, self._random, every)
        context.commit_on_device(tree, accepted.path, accepted.next_token)
        base_length, roots, is_live, _ = self.rows
        base_length.copy_(context.base_length.where(is_live, base_length))
        roots.copy_(context.roots([]))
        self._tree, self._logits = tree, logits
        return outcome_of(tree, accepted)

    def _draft(self) -> DraftTree:
        context = self.pipeline.context
        base_length, roots, *_ = self.rows
        lengths = (self.highest,) * len(roots)
        context.follow(lengths, base_length, roots)
        session = context.session
        if isinstance(session, DeviceSession):
            session.follow(lengths, base_length, roots)
        if session is None or self.budget is None:
            return DraftTree.empty(base_length)
        tree = session.propose(self.budget, self._random)
        return tree.limited(context.target.spec.max_position - 1)


def _unsound() -> NumericalError:
    return NumericalError(
        "the probabilities of a decoding step are not valid",
        expected="finite logits, and candidates with a draft probability above 0",
        got="NaN, inf, or a candidate with probability 0",
        remedy="decode with captured=False; the error message then names the cause",
    )
