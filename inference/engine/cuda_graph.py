"""Functions whose kernels are recorded as a CUDA graph."""

import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from threading import Lock
from typing import Any

import torch
from torch import Tensor

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
