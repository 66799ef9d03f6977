"""Events of a profiler's trace are counted within one window of time."""

from typing import Any

import pytest
import torch

from inference.profiling.gpu.sections.step import WINDOW, counts_of, traced


def _event(name: str, category: str, start: float, duration: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": duration}


EVENTS = [
    {"ph": "M", "name": "process_name"},
    _event(WINDOW, "gpu_user_annotation", 120, 500),
    _event(WINDOW, "user_annotation", 100, 100),
    _event("cudaLaunchKernel", "cuda_runtime", 90, 5),  # before the window
    _event("cudaLaunchKernel", "cuda_runtime", 101, 5),
    _event("cudaLaunchKernelExC", "cuda_runtime", 110, 5),
    _event("cuLaunchKernelEx", "cuda_driver", 116, 5),
    _event("cudaGraphLaunch", "cuda_runtime", 120, 5),
    _event("cudaMemcpyAsync", "cuda_runtime", 130, 5),
    _event("cudaStreamSynchronize", "cuda_runtime", 140, 20),
    _event("cudaLaunchKernel", "cpu_op", 150, 5),  # not a call of the runtime
    _event("gemm", "kernel", 110, 20),
    _event("softmax", "kernel", 120, 20),  # overlaps
    _event("Memcpy DtoH", "gpu_memcpy", 150, 10),
    _event("late", "kernel", 190, 50),  # ends after the window
    _event("cudaDeviceSynchronize", "cuda_runtime", 205, 5),
]


def test_launches_waits_and_busy_time_are_those_of_the_window() -> None:
    counts = counts_of(EVENTS)
    assert (counts.launches, counts.copies, counts.waits) == (4, 1, 1)
    assert counts.busy == pytest.approx((30 + 10 + 10) / 100)


def test_a_trace_without_the_window_is_refused() -> None:
    with pytest.raises(ValueError, match="no range"):
        counts_of(EVENTS[3:])


def test_without_a_gpu_the_work_is_done_and_not_counted() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done: list[int] = []
    assert traced(lambda: done.append(1)) is None
    assert done == [1]


@pytest.mark.gpu
def test_kernels_and_waits_of_a_gpu_are_counted() -> None:
    number = torch.zeros(1, device="cuda")

    def work() -> None:
        for _ in range(10):
            number.add_(1)
        number.item()

    counts = traced(work)
    assert counts is not None
    assert counts.launches == 10
    assert counts.waits == 1
    assert 0 < counts.busy < 1
