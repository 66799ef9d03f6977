"""Functions whose kernels are recorded as a CUDA graph, and the random numbers they read."""

import warnings
from collections.abc import Callable, Sequence
from math import prod
from threading import Lock
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from inference.sampling.random_numbers import StepRandom, StreamKey, numbers_of

_RECORDING = Lock()  # torch records one CUDA graph at a time


class RecordedFunction:
    """A function whose kernels are launched together once they have been recorded.

    Apart from temporary tensors, the function may only use tensors that keep their addresses and
    are never freed, and it must not wait for the device. On a CPU, or if recording fails, the
    function is called instead.

    Args:
        state: tensors that the function changes and that a later call depends on. They keep their
            values while the function is recorded.
        pool: memory for temporary tensors, from `torch.cuda.graph_pool_handle`. Functions that
            share it must follow each other in one stream, and each overwrites what the others have
            left, except their results.
    """

    def __init__(
        self,
        function: Callable[[], Tensor],
        state: Sequence[Tensor],
        device: torch.device,
        pool: Any = None,
    ) -> None:
        self._function = function
        self._state = tuple(state)
        self._device = device
        self._pool = pool
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
                pool=self._pool,
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

    def replace(self, keys: Sequence[StreamKey]) -> None:
        """Copy the numbers of another step to the device, if any have been requested yet."""
        self._keys = keys
        if self._numbers is not None:
            numbers = numbers_of(keys, self._num_uniforms, self._num_exponentials)
            if self._numbers.is_cuda:
                numbers = numbers.pin_memory()
            self._numbers.copy_(numbers, non_blocking=True)

    def exponentials(
        self, shapes: Sequence[tuple[int, int]]
    ) -> list[Float[Tensor, "batch parents m"]]:
        sizes = [prod(shape) for shape in shapes]
        numbers = self._with(sum(sizes))
        levels = numbers[:, self._num_uniforms :].split(sizes, dim=1)
        return [level.unflatten(1, shape) for level, shape in zip(levels, shapes, strict=True)]

    def uniforms(self, count: int) -> Float[Tensor, "batch count"]:
        return self._with(self._num_exponentials)[:, :count]

    def _with(self, num_exponentials: int) -> Tensor:
        """Return the numbers, after allocating them at the first request."""
        if self._numbers is None or num_exponentials != self._num_exponentials:
            self._num_exponentials = num_exponentials
            numbers = numbers_of(self._keys, self._num_uniforms, num_exponentials)
            self._numbers = self._copied(numbers)
        return self._numbers
