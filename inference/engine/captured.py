"""Decoding steps that start before the host has read the result of the previous step.

A step drafts, verifies, accepts and commits on the device. On a GPU, it is recorded as a CUDA graph
for each size of trees. What a step has computed beyond the end of a sequence is discarded.
"""

import time
from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING
from weakref import proxy

import torch

from inference.engine.acceptance import AcceptResult, needs_no_host, read_results
from inference.engine.context import Context, most_per_step
from inference.engine.decode_step import DecodeStep
from inference.engine.device_step import DeviceBatch, RecordedStep, Rows, UnreadStep
from inference.engine.request import SequenceState
from inference.protocol import DeviceSession, Drafter
from inference.sampling.batch import BatchSampling
from inference.sampling.options import Sampling
from jakiro.errors import NumericalError
from jakiro.target.adapter import TargetAdapter
from jakiro.target.weights import version_of

if TYPE_CHECKING:
    from inference.engine.batch import DecodeBatch

# Recorded steps read the slots of all positions up to a multiple of this number, so that few steps
# have to be recorded.
STRIDE = 2048
MOST_RECORDED = 64  # largest number of recorded steps of a context
MOST_KEPT = 2  # largest number of contexts that are kept for later runs
# Number of tokens of a sequence that only fills a batch. Every token of it attends to some token,
# because attention to nothing may be NaN.
FILLED = 2


def recording_key(sampling: Sampling) -> tuple[bool, tuple[str, ...]]:
    """Return what recorded steps depend on; a single temperature can change between steps."""
    return sampling.form if len(sampling.temperatures) <= 1 else sampling.description


def batch_size_for(count: int) -> int:
    """Return the size of batches in which a number of sequences is decoded: a power of two."""
    return 1 << max(count - 1, 0).bit_length()


class CapturedSteps:
    """The steps of the sequences of a context, which are recorded as CUDA graphs on a GPU.

    A step starts before the host has read the result of the step before it, so a learning policy
    plans the step without this result. Steps are ordinary ones if the drafter waits for the device,
    if a processor may read the preceding tokens, if there is a stopping criterion other than
    length, time and end-of-sequence tokens, if the requests differ in more than their temperatures,
    if only some of them ask for drafts, or if details of the tokens are returned.

    A sequence that is complete leaves after the step that was under way. If another sequence joins
    or leaves, the step under way is discarded, and repeated with the same random numbers.

    Batches are filled up to a power of two, or up to the number of sequences for which the context
    has room, so that few steps have to be recorded while sequences join and leave.
    """

    batch: "DecodeBatch"
    sampling: BatchSampling  # options of the sequences, and of those that only fill the batch

    def __init__(self, context: Context) -> None:
        self.context = context
        self.is_running = False  # whether the lengths of the context are out of date
        self.unread: UnreadStep | None = None  # the step under way
        self.num_recorded = 0  # steps so far
        self._last_use: torch.cuda.Event | None = None
        self._allocate()

    def _allocate(self) -> None:
        """Allocate what recorded steps refer to; nothing is recorded yet."""
        context = self.context
        count, device = context.cache.num_rows, context.target.device
        lengths = torch.full((count,), FILLED, device=device)
        roots = torch.zeros_like(lengths)[:, None]
        is_live = torch.zeros_like(lengths, dtype=torch.bool)
        temperatures = torch.ones(count, dtype=torch.float64, device=device)
        self.rows = Rows(lengths, roots, is_live, temperatures)
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.recorded: dict[object, RecordedStep] = {}  # the most recently used is last
        self._tensors = _tensors_of(context)

    @property
    def is_valid(self) -> bool:
        return self._tensors == _tensors_of(self.context)

    @property
    def can_step(self) -> bool:
        requests = [state.request for state in self.batch.live]
        if any(self.batch.record_of(request) is not None for request in requests):
            return False
        if not self.context.works_on_device:
            return False
        if len({request.drafts for request in requests}) > 1:
            return False
        are_alike = len({recording_key(request.sampling) for request in requests}) == 1
        is_on_device = are_alike and needs_no_host(requests[0].sampling)
        return is_on_device and not any(request.stop.others for request in requests)

    def attach(self, batch: "DecodeBatch") -> None:
        self.batch = proxy(batch)  # an abandoned batch is freed at once

    @torch.inference_mode()
    def step(self) -> list[DecodeStep]:
        """Start a decoding step, and emit the tokens of the step before."""
        started = time.perf_counter()
        batch = self.batch
        with batch.clock("verify"):
            self._resume()
            num_recorded = self.num_recorded
            if self.unread is None:
                self._start()
            unread, self.unread = self.unread, None
            assert unread is not None
            # The limits of the next trees depend on what a policy has learned from earlier steps.
            if not batch.is_pausing:
                self._start(most_per_step(batch.drafter))
            results = self._read(unread, batch.live)
            batch.check(results)
        with batch.clock("commit"):
            running = [state for state in batch.live if not state.is_finished]
            steps = batch.emit_all(running, results)
            for state in running:
                state.stats.target_forwards += 1
            finished = [state.is_finished for state in batch.live]
            if all(finished) or (any(finished) and self.unread is None):
                self.discard_step()
        is_typical = self.num_recorded == num_recorded
        batch.learn(results, time.perf_counter() - started if is_typical else None, unread.budget)
        return steps

    def stop(self) -> None:
        """Give the context its exact lengths again, and discard the step under way.

        Ordinary steps may follow, and sequences may join or leave.
        """
        if not self.is_running:
            return
        self.is_running = False
        if self.unread is not None:
            self._count_step(-1)
        self.unread = None
        token_ids = [state.token_ids for state in self.batch.live]
        self.context.show_rows(self.sampling.of_sequences(range(len(token_ids))))
        self.context.lengths = [len(ids) - 1 for ids in token_ids]
        if isinstance(self.context.session, DeviceSession):
            self.context.session.follow(
                tuple(self.context.lengths),
                self.context.base_length,
                self.context.roots(token_ids),
            )

    @torch.inference_mode()
    def discard_step(self) -> None:
        self.stop()
        if any(state.is_finished for state in self.batch.live):
            self.batch.retire()

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

    def _resume(self) -> None:
        """Prepare for steps of the live sequences, unless such steps are running already."""
        if self.is_running:
            return
        context, live = self.context, self.batch.live
        tokens, count = [state.token_ids for state in live], len(live)
        if context.session is not None:
            context.catch_up(tokens)
        longest = max(state.request.max_length for state in live)
        # A step that is discarded in the end may write further tokens.
        context.reserve(longest + most_per_step(context.drafter))
        if not self.is_valid:
            self._allocate()
        sampling = [state.request.sampling for state in live]
        rows = self.rows.first(count)
        rows.base_length.copy_(context.base_length)
        rows.roots.copy_(context.roots(tokens))
        if has_one_temperature := len(sampling[0].temperatures) == 1:
            temperatures = [options.temperatures[0] for options in sampling]
            rows.temperatures.copy_(torch.tensor(temperatures, dtype=torch.float64))
        self.rows.base_length[count:] = FILLED
        self.rows.is_live[:count] = True
        self.rows.is_live[count:] = False
        size = min(batch_size_for(count), context.cache.num_rows)
        self.sampling = BatchSampling(
            [*sampling, *[sampling[0]] * (size - count)],
            self.rows.temperatures[:size] if has_one_temperature else None,
        )
        context.show_rows(self.sampling)
        self.is_running = True

    def _start(self, num_unread: int = 0) -> None:
        self._count_step(1)
        budget, live = self.batch.next_budget(), self.batch.live
        most, capacity = self.context.most_queries, self.context.cache.capacity
        longest = max(len(state.token_ids) for state in live) + num_unread + most
        # The last slot of a stride is the last one that a step reads.
        strides, size = -(-min(longest, capacity) // STRIDE), len(self.sampling.each)
        key = (size, budget, strides, recording_key(self.sampling.each[0]))
        recorded = self.recorded.pop(key, None)
        if recorded is None:
            rows, highest = self.rows.first(size), strides * STRIDE - most
            batch = DeviceBatch(self.context, rows, self.sampling, highest)
            recorded = RecordedStep(batch, budget, self.pool)
            self.num_recorded += 1
        self.recorded[key] = recorded
        if len(self.recorded) > MOST_RECORDED:
            del self.recorded[next(iter(self.recorded))]
        self.unread = recorded.start([state.stream_key for state in live])

    def _read(self, unread: UnreadStep, sequences: Sequence[SequenceState]) -> list[AcceptResult]:
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

    def _count_step(self, difference: int) -> None:
        self.batch.num_steps += difference
        for state in self.batch.live:
            state.num_steps += difference


class CapturedPool:
    """Captured steps that no run uses, which are kept with their caches for later runs."""

    def __init__(self) -> None:
        self._unused: list[CapturedSteps] = []
        self._lock = Lock()

    def take(
        self,
        target: TargetAdapter,
        drafter: Drafter | None,
        sampling: Sampling,
        batch: int,
        capacity: int,
    ) -> CapturedSteps:
        target.modules.follow_changes()
        with self._lock:
            for index, captured in enumerate(self._unused):
                context = captured.context
                cache = context.cache
                is_same = context.target is target and context.drafter is drafter
                has_rows = cache.num_rows >= batch
                has_room = has_rows and cache.capacity >= capacity + context.most_queries
                if is_same and has_room and captured.is_valid:
                    del self._unused[index]
                    captured.enter_stream()
                    context.restart(sampling, batch)
                    return captured
        strides, rows = capacity // STRIDE + 1, batch_size_for(batch)
        captured = CapturedSteps(Context(target, drafter, sampling, rows, strides * STRIDE))
        captured.context.select_sequences(range(batch))
        return captured

    def give(self, captured: CapturedSteps) -> None:
        """Keep captured steps for later runs, or free the context if it cannot be used again."""
        removed = [captured]
        captured.leave_stream()
        if captured.is_valid and captured.context.works_on_device:
            with self._lock:
                self._unused.insert(0, captured)
                removed = self._unused[MOST_KEPT:]
                del self._unused[MOST_KEPT:]
        for captured in removed:
            captured.recorded.clear()
            captured.context.close()


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
