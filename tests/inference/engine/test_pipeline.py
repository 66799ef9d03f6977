"""A pipeline that another run takes waits for the CUDA stream in which it was used last.

The streams and events are doubles, which note what is asked of them, so that no GPU is needed.
"""

from collections.abc import Callable

import pytest
import torch
from helpers.models import tiny_llama
from transformers import LogitsProcessorList

from inference.engine.context import Context
from inference.engine.pipeline import Pipeline, PipelinePool
from inference.sampling.options import Sampling
from jakiro.target.adapter import TargetAdapter

GREEDY = Sampling(LogitsProcessorList(), do_sample=False)


class _Streams:
    """Doubles of CUDA streams, and what happened in which of them."""

    def __init__(self) -> None:
        self.present = "first"
        self.log: list[str] = []

    def current_stream(self, _: torch.device) -> "_Stream":
        return _Stream(self, self.present)


class _Stream:
    def __init__(self, streams: _Streams, name: str) -> None:
        self.streams, self.name = streams, name

    def wait_event(self, event: "_Event") -> None:
        self.streams.log.append(f"{self.name} waits for {event.recorded}")


class _Event:
    recorded = "nothing"

    def record(self, stream: _Stream) -> None:
        self.recorded = f"{stream.name}, after {len(stream.streams.log)} entries"
        stream.streams.log.append(f"event in {stream.name}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> _Streams:
    """The doubles, which also note when a context is used again."""
    found, restart = _Streams(), Context.restart

    def noted(context: Context, sampling: Sampling, batch: int) -> None:
        found.log.append(f"restart in {found.present}")
        restart(context, sampling, batch)

    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "current_stream", found.current_stream)
    monkeypatch.setattr(Context, "restart", noted)
    return found


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Function after which a target seems to be on a GPU; its tensors stay where they are."""

    def pretend() -> None:
        monkeypatch.setattr(TargetAdapter, "device", torch.device("cuda", 0))

    return pretend


def _taken(pool: PipelinePool, target: TargetAdapter) -> Pipeline:
    return pool.take(target, None, GREEDY, 1, 16)


def test_the_next_run_waits_for_the_stream_of_the_last_one(
    streams: _Streams, on_cuda: Callable[[], None]
) -> None:
    target, pool = TargetAdapter(tiny_llama()), PipelinePool()
    pipeline = _taken(pool, target)
    on_cuda()
    assert streams.log == []  # nobody has used a new pipeline
    pool.give(pipeline)
    streams.present = "second"
    assert _taken(pool, target) is pipeline
    assert streams.log == [
        "event in first",
        "second waits for first, after 0 entries",
        "restart in second",
    ]
