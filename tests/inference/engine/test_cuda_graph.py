"""Recorded functions, and buffers that copies are under way from; CUDA graphs need a GPU."""

import pytest
import torch
from torch import Tensor

from inference.engine.cuda_graph import HostBuffers, RecordedFunction


def test_on_a_cpu_the_function_is_called() -> None:
    state = torch.zeros(2)
    function = RecordedFunction(lambda: state.add_(1).clone(), [state], state.device)
    assert [function().tolist() for _ in range(3)] == [[1, 1], [2, 2], [3, 3]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
def test_on_a_gpu_the_recorded_function_starts_from_the_state_before() -> None:
    state = torch.zeros(2, device="cuda")
    function = RecordedFunction(lambda: state.add_(1).clone(), [state], state.device)
    assert [function().tolist() for _ in range(3)] == [[1, 1], [2, 2], [3, 3]]
    assert function._graph is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
def test_on_a_gpu_a_function_that_waits_for_the_host_is_called() -> None:
    state = torch.zeros(2, device="cuda")

    def waiting() -> Tensor:
        return state.add_(1) * state.sum().item()

    function = RecordedFunction(waiting, [state], state.device)
    with pytest.warns(UserWarning, match="cannot be recorded"):
        first = function().tolist()
    assert first == [2, 2]
    assert function().tolist() == [8, 8]


class _Event:
    """A double of a CUDA event, after which a copy is complete."""

    def __init__(self, number: int, log: list[str]) -> None:
        self.number = number
        self.log = log

    def synchronize(self) -> None:
        """Note that the host has waited."""
        self.log.append(f"wait {self.number}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The copies that were started, and those that the host has waited for, in this order."""
    log: list[str] = []

    def event(_: HostBuffers) -> _Event:
        started = sum(entry.startswith("copy") for entry in log)
        log.append(f"copy {started}")
        return _Event(started, log)

    monkeypatch.setattr(HostBuffers, "_event", event)
    return log


def test_an_upload_waits_for_the_last_copy_from_its_buffer(log: list[str]) -> None:
    buffers = HostBuffers(torch.zeros(2), torch.device("cpu"))
    destination = torch.zeros(2)
    for number in range(4):
        buffers.upload(torch.full((2,), float(number)), destination)
        assert destination.tolist() == [number, number]
    assert log == ["copy 0", "copy 1", "wait 0", "copy 2", "wait 1", "copy 3"]


def test_a_download_keeps_the_result_of_the_one_before(log: list[str]) -> None:
    buffers = HostBuffers(torch.zeros(1), torch.device("cpu"))
    copies = [buffers.download(torch.full((1,), float(number)))[0] for number in range(2)]
    assert [copy.tolist() for copy in copies] == [[0], [1]]
    assert log == ["copy 0", "copy 1"]
