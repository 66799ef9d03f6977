"""Functions whose kernels are recorded as a CUDA graph, and what these refer to."""

import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod
from threading import Lock
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from inference.sampling.random_numbers import StepRandom, StreamKey, numbers_of

_RECORDING = Lock()  # torch records one CUDA graph at a time


class GraphMemory:
    """Memory for the temporary tensors of several recorded functions.

    Calls of these functions must follow each other in one stream. Each function overwrites what the
    others have left, except their results, which stay allocated as long as they are referenced.
    """

    @cached_property
    def handle(self) -> Any:
        """The identifier of the memory in torch."""
        return torch.cuda.graph_pool_handle()


class RecordedFunction:
    """A function whose kernels are launched together once they have been recorded.

    Apart from temporary tensors, the function may only use tensors that keep their addresses and
    are never freed, and it must not wait for the device. On a CPU, or if recording fails, the
    function is called instead.

    Args:
        state: tensors that the function changes and that a later call depends on. They keep their
            values while the function is recorded.
    """

    def __init__(
        self,
        function: Callable[[], Tensor],
        state: Sequence[Tensor],
        device: torch.device,
        memory: "GraphMemory | None" = None,
    ) -> None:
        self._function = function
        self._state = tuple(state)
        self._device = device
        self._memory = memory
        self._graph: torch.cuda.CUDAGraph | None = None
        self._is_recordable = device.type == "cuda"
        self._output: Tensor | None = None

    def __call__(self) -> Tensor:
        """Run the function; the next call may overwrite the result."""
        if self._is_recordable and self._graph is None:
            self._record()
        if self._graph is None or self._output is None:
            return self._function()
        self._graph.replay()
        return self._output

    def _record(self) -> None:
        """Record the function, after a call that allocates memory and compiles kernels."""
        before = [tensor.clone() for tensor in self._state]
        try:
            with _RECORDING, torch.cuda.device(self._device):
                self._graph, self._output = self._recorded(before)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._is_recordable = False
            warnings.warn(
                f"decoding steps cannot be recorded as a CUDA graph, so they are slower: {error}",
                stacklevel=2,
            )
        finally:
            self._restore(before)

    def _recorded(self, before: Sequence[Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                self._function()
        finally:
            current.wait_stream(stream)
        self._restore(before)
        graph = torch.cuda.CUDAGraph()
        # The outer block makes `current` the current stream again even if recording fails.
        with (
            torch.cuda.stream(current),
            torch.cuda.graph(
                graph,
                pool=None if self._memory is None else self._memory.handle,
                stream=stream,
                capture_error_mode="thread_local",
            ),
        ):
            output = self._function()
        return graph, output

    def _restore(self, values: Sequence[Tensor]) -> None:
        for tensor, value in zip(self._state, values, strict=True):
            tensor.copy_(value)


class FixedRandom(StepRandom):
    """Random numbers at a fixed address, which are replaced before every decoding step.

    The numbers are those of `StepRandom`.
    """

    def __init__(self, device: torch.device, num_uniforms: int) -> None:
        super().__init__((), device, num_uniforms)
        self._num_exponentials = 0
        self._numbers: Tensor | None = None  # at the fixed address
        self._hosts: HostBuffers | None = None

    def replace(self, keys: Sequence[StreamKey]) -> None:
        """Copy the numbers of another step to the device, if any have been requested yet."""
        self._keys = keys
        if self._numbers is None or self._hosts is None:
            return
        numbers = numbers_of(keys, self._num_uniforms, self._num_exponentials)
        self._hosts.upload(numbers, self._numbers)

    def exponentials(
        self, shapes: Sequence[tuple[int, int]]
    ) -> list[Float[Tensor, "batch parents m"]]:
        """Return noise of the standard exponential distribution, for each level of the trees."""
        sizes = [prod(shape) for shape in shapes]
        numbers = self._with(sum(sizes))
        levels = numbers[:, self._num_uniforms :].split(sizes, dim=1)
        return [level.unflatten(1, shape) for level, shape in zip(levels, shapes, strict=True)]

    def uniforms(self, count: int) -> Float[Tensor, "batch count"]:
        """Return numbers in [0, 1), by which the candidates of each sequence are accepted.

        Args:
            count: number of numbers for each sequence, at most `num_uniforms`.
        """
        return self._with(self._num_exponentials)[:, :count]

    def _with(self, num_exponentials: int) -> Tensor:
        """Return the numbers, after allocating them at the first request."""
        if self._numbers is None or num_exponentials != self._num_exponentials:
            self._num_exponentials = num_exponentials
            host = numbers_of(self._keys, self._num_uniforms, num_exponentials)
            self._hosts = HostBuffers(host, self._device)
            self._numbers = host.to(self._device)
        return self._numbers


class HostBuffers:
    """Two buffers on the host, which take turns because a copy from or to one may be under way."""

    def __init__(self, like: Tensor, device: torch.device) -> None:
        self._is_pinned = device.type == "cuda"
        self._device = device
        shape, dtype = like.shape, like.dtype
        self._buffers = [
            torch.empty(shape, dtype=dtype, pin_memory=self._is_pinned) for _ in range(2)
        ]
        self._copied: list[torch.cuda.Event | None] = [None, None]

    def upload(self, values: Tensor, destination: Tensor) -> None:
        """Copy values to the device."""
        self._take_turns()
        if (copied := self._copied[0]) is not None:
            copied.synchronize()  # the last copy from this buffer, two uploads ago
        self._buffers[0].copy_(values)
        destination.copy_(self._buffers[0], non_blocking=True)
        self._copied[0] = self._event()

    def download(self, source: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start to copy a tensor to the host.

        Returns:
            The copy, which is overwritten by the next call but one; and the event after which it is
            complete, or None if it is complete already.
        """
        self._take_turns()
        self._buffers[0].copy_(source, non_blocking=True)
        self._copied[0] = self._event()
        return self._buffers[0], self._copied[0]

    def _take_turns(self) -> None:
        self._buffers.reverse()
        self._copied.reverse()

    def _event(self) -> torch.cuda.Event | None:
        if not self._is_pinned:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event
