"""Decoding steps on the device, with the recorded parts that they consist of.

A step drafts, verifies, accepts and commits without waiting for the host, so it may start before
the host has read the previous result. On a GPU, its parts are recorded as CUDA graphs. What a step
has computed beyond the end of a sequence is discarded.
"""

from collections.abc import Callable, Sequence
from threading import Lock
from typing import TypeVar

import torch

from inference.engine.acceptance import AcceptResult, read_results
from inference.engine.buffers import TreeBuffer, TreeForm
from inference.engine.context import Context
from inference.engine.cuda_graph import GraphMemory
from inference.engine.device_step import DeviceBatch, DraftPart, Rows, UnreadStep, VerifyPart
from inference.engine.request import SequenceState
from inference.protocol import Budget, DeviceSession, Drafter
from inference.sampling.batch import BatchSampling
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import StreamKey
from jakiro.errors import NumericalError
from jakiro.target.adapter import TargetAdapter
from jakiro.target.weights import version_of

# Recorded steps read the slots of all positions up to a multiple of this number, so that few steps
# have to be recorded.
STRIDE = 2048
MOST_RECORDED = 64  # largest number of recorded parts of a pipeline, for each kind of part
# Number of tokens of a sequence that only fills a batch. Every token of it attends to some token,
# because attention to nothing may be NaN.
FILLED = 2

Part = TypeVar("Part")


def recording_key(sampling: Sampling) -> tuple[bool, tuple[str, ...]]:
    """Return what recorded steps depend on; a single temperature can change between steps."""
    return sampling.form if len(sampling.temperatures) <= 1 else sampling.description


def batch_size_for(count: int) -> int:
    """Return the size of batches in which a number of sequences is decoded: a power of two."""
    return 1 << max(count - 1, 0).bit_length()


class Pipeline:
    """Decoding steps of the sequences of a context.

    A step may start before the host has read the result of the step before it. Until `stop`, the
    lengths in the context and its session are out of date.

    Batches are filled up to a power of two, or up to the number of sequences for which the context
    has room, so that few steps have to be recorded while sequences join and leave.
    """

    sampling: BatchSampling  # options of the sequences, and of those that only fill the batch

    def __init__(self, context: Context) -> None:
        self.context = context
        count, device = context.cache.num_rows, context.target.device
        lengths = torch.full((count,), FILLED, device=device)
        roots = torch.zeros_like(lengths)[:, None]
        is_live = torch.zeros_like(lengths, dtype=torch.bool)
        temperatures = torch.ones(count, dtype=torch.float64, device=device)
        self.rows = Rows(lengths, roots, is_live, temperatures)
        self.memory = GraphMemory()
        self._tensors = _tensors_of(context)
        self._draft_parts: dict[object, DraftPart] = {}
        self._buffers: dict[TreeForm, TreeBuffer] = {}
        self._verify_parts: dict[object, VerifyPart] = {}
        self.unread: UnreadStep | None = None  # the step under way
        self.num_recorded = 0  # parts of steps so far
        self._last_use: torch.cuda.Event | None = None

    @property
    def is_valid(self) -> bool:
        """Whether the caches and weights are those that the recorded steps refer to."""
        return self._tensors == _tensors_of(self.context)

    def resume(self, sampling: Sequence[Sampling], token_ids: Sequence[list[int]]) -> None:
        """Prepare for steps; the context and its session must contain all tokens but the last."""
        count = len(token_ids)
        live = self.rows.first(count)
        live.base_length.copy_(self.context.base_length)
        live.roots.copy_(self.context.roots(token_ids))
        if has_one_temperature := len(sampling[0].temperatures) == 1:
            temperatures = [options.temperatures[0] for options in sampling]
            live.temperatures.copy_(torch.tensor(temperatures, dtype=torch.float64))
        self.rows.base_length[count:] = FILLED
        self.rows.is_live[:count] = True
        self.rows.is_live[count:] = False
        size = min(batch_size_for(count), self.context.cache.num_rows)
        self.sampling = BatchSampling(
            [*sampling, *[sampling[0]] * (size - count)],
            self.rows.temperatures[:size] if has_one_temperature else None,
        )
        self.context.show_rows(self.sampling)

    @property
    def batch_size(self) -> int:
        """The number of sequences, with those that only fill the batch."""
        return len(self.sampling.each)

    @torch.inference_mode()
    def start(self, budget: Budget | None, keys: Sequence[StreamKey], longest: int) -> None:
        """Start the next step, which becomes the one under way."""
        # The last slot of a stride is the last one that a step reads.
        longest += self.context.most_queries
        strides = -(-min(longest, self.context.cache.capacity) // STRIDE)
        rows, highest = self.rows.first(self.batch_size), strides * STRIDE
        batch = DeviceBatch(self.context, rows, self.sampling, highest - self.context.most_queries)
        key = strides, recording_key(self.sampling.each[0])
        drafting = self._recent(
            self._draft_parts,
            (self.batch_size, budget, key),
            lambda: DraftPart(batch, budget, self._buffers, self.memory),
        )
        buffer = drafting.start(keys)
        verification = self._recent(
            self._verify_parts,
            (buffer.form, key),
            lambda: VerifyPart(batch, buffer, self.memory),
        )
        self.unread = verification.start(keys, budget)

    def _recent(self, parts: dict[object, Part], key: object, new: Callable[[], Part]) -> Part:
        """Return a part of steps; a new one replaces the one that was used least recently."""
        part = parts.pop(key, None)
        if part is None:
            part = new()
            self.num_recorded += 1
        parts[key] = part
        if len(parts) > MOST_RECORDED:
            del parts[next(iter(parts))]
        return part

    def read(self, unread: UnreadStep, sequences: Sequence[SequenceState]) -> list[AcceptResult]:
        """Wait for a step, and return the outcome of each sequence that is not finished.

        The outcome of a sequence is an error if the target's logits or the draft distributions are
        not valid. On a GPU, the next step may have overwritten them already, so the error does not
        name the cause.
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
        numbers = [unread.keys[index][-1] for index in running]
        return [
            result
            if sound or result.error is not None
            else result._replace(path=[], error=_unsound(number))
            for result, sound, number in zip(results, is_sound, numbers, strict=True)
        ]

    def forget_steps(self) -> None:
        self._draft_parts.clear()
        self._verify_parts.clear()
        self._buffers.clear()

    def leave_stream(self) -> None:
        """Record the last use in the current CUDA stream."""
        device = self.context.target.device
        if device.type == "cuda":
            self._last_use = torch.cuda.Event()
            self._last_use.record(torch.cuda.current_stream(device))

    def enter_stream(self) -> None:
        """Let the current CUDA stream, which may be a different one, wait for the last use."""
        if self._last_use is not None:
            torch.cuda.current_stream(self.context.target.device).wait_event(self._last_use)

    def stop(self, token_ids: Sequence[list[int]]) -> None:
        """Give the context its exact lengths again, and discard the step under way."""
        self.unread = None
        self.context.show_rows(self.sampling.of_sequences(range(len(token_ids))))
        self.context.lengths = [len(ids) - 1 for ids in token_ids]
        if isinstance(self.context.session, DeviceSession):
            self.context.session.follow(
                tuple(self.context.lengths),
                self.context.base_length,
                self.context.roots(token_ids),
            )


class PipelinePool:
    """Unused pipelines, which are kept with their caches and recorded steps for later runs."""

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
        """Return a pipeline with an empty context."""
        target.modules.follow_changes()
        with self._lock:
            for index, pipeline in enumerate(self._unused):
                context = pipeline.context
                cache = context.cache
                is_same = context.target is target and context.drafter is drafter
                has_rows = cache.num_rows >= batch
                has_room = has_rows and cache.capacity >= capacity + context.most_queries
                if is_same and has_room and pipeline.is_valid:
                    del self._unused[index]
                    pipeline.enter_stream()
                    pipeline.context.restart(sampling, batch)
                    return pipeline
        strides, rows = capacity // STRIDE + 1, batch_size_for(batch)
        pipeline = Pipeline(Context(target, drafter, sampling, rows, strides * STRIDE))
        pipeline.context.select_sequences(range(batch))
        return pipeline

    def give(self, pipeline: Pipeline) -> None:
        """Keep a pipeline for later runs, or free its context if it cannot be used again."""
        removed = [pipeline]
        pipeline.leave_stream()
        if pipeline.is_valid and pipeline.context.works_on_device:
            with self._lock:
                self._unused.insert(0, pipeline)
                removed = self._unused[self._size :]
                del self._unused[self._size :]
        for pipeline in removed:
            pipeline.forget_steps()
            pipeline.context.close()


def _tensors_of(context: Context) -> tuple[object, ...]:
    """Return what changes if the caches or the weights of a context are replaced.

    These are the address of the first layer's keys, the size of the cache, and the address and the
    version (see `version_of`) of every weight of the target.
    """
    cache = context.cache
    weights = [version_of(weight) for weight in context.target.model.parameters()]
    keys = cache.slot_layers[0].keys
    return keys.data_ptr(), cache.num_rows, cache.capacity, tuple(weights)


def _unsound(number: int) -> NumericalError:
    return NumericalError(
        f"the probabilities of decoding step {number} of a sequence are not valid",
        expected="finite logits, and candidates with a draft probability above 0",
        got="NaN, inf, or a candidate with probability 0",
        remedy="decode with captured=False; the error message then names the cause",
    )
