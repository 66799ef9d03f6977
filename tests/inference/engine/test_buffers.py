"""Buffers on the host are not changed while a copy from them is under way."""

import pytest
import torch

from inference.engine.buffers import HostBuffers


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
