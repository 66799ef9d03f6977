"""The processes of a run learn of each other's errors."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from jakiro.errors import JakiroError
from training.distributed import processes
from training.distributed.processes import Processes, join_processes, launch_environment


@dataclass(frozen=True)
class Second(Processes):
    """The second of two processes, for which a list stands in for the messages of the first."""

    of_first: list[Any] = field(default_factory=list)

    def gather(self, part: Any) -> list[Any]:
        return [self.of_first.pop(), part]


@dataclass(frozen=True)
class First(Processes):
    """The first of two processes, which keeps its messages to the second."""

    sent: list[Any] = field(default_factory=list)

    def gather(self, part: Any) -> list[Any]:
        self.sent.append(part)
        return [part, None]


def test_a_gpu_is_the_current_device_before_the_processes_talk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(processes, "choose_device", lambda _: torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    with launch_environment("cpu"), join_processes("auto") as joined:
        assert [joined.device] == chosen == [torch.device("cuda", 1)]


def test_an_error_without_a_message_stops_the_other_process_as_well() -> None:
    first = First(0, 2, torch.device("cpu"))
    with pytest.raises(MemoryError), first.together():
        raise MemoryError
    second = Second(1, 2, torch.device("cpu"), of_first=first.sent)
    with pytest.raises(JakiroError, match="MemoryError"), second.together():
        pass


def test_no_process_raises_an_error_if_all_succeed() -> None:
    first = First(0, 2, torch.device("cpu"))
    with first.together():
        pass
    with Second(1, 2, torch.device("cpu"), of_first=first.sent).together():
        pass
