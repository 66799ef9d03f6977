"""Functions that are compiled or captured as CUDA graphs on a GPU, but unchanged on a CPU."""

from collections.abc import Callable
from typing import Any

import torch

from inference.benchmark.timing import Work
from jakiro.target.adapter import compile_mode

WARM_UP = 3  # calls before a function is captured, in which libraries choose and prepare kernels


class _Replay:
    """A captured function; it keeps the function, whose tensors the graph reads and writes."""

    def __init__(self, graph: torch.cuda.CUDAGraph, work: Work) -> None:
        self.graph = graph
        self.work = work

    def __call__(self) -> None:
        self.graph.replay()


def captured(work: Work, device: torch.device) -> Work:
    """Return a function that replays a CUDA graph of `work`; on a CPU, `work` itself.

    Before the capture, `work` is called `WARM_UP` times, which changes its state. The capture
    itself computes nothing. All tensors that `work` reads and writes must keep their addresses, so
    results must be written into tensors that exist before.

    Args:
        work: function that only queues work on the device, without waiting for it.
        device: device on which `work` computes.
    """
    if device.type != "cuda":
        return work
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            work()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return _Replay(graph, work)


def compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return a function, compiled with CUDA graphs on a GPU; on a CPU, the function itself.

    Every shape is compiled separately, because CUDA graphs need fixed shapes.

    Args:
        function: function of tensors.
        device: device on which the function computes.
    """
    if device.type != "cuda":
        return function
    return torch.compile(function, mode=compile_mode(device), dynamic=False)
