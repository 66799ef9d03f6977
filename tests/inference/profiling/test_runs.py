"""The overhead of a decoding step is the share of its time outside the forward passes."""

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama

from inference.profiling.forwards import Recorder, Stopwatch, watched
from inference.profiling.runs import Spent, measure_overhead
from inference.profiling.subject import Effort, ProfilingSubject
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter
from jakiro.target.cache import TargetState
from jakiro.target.step import chain_step


@pytest.mark.parametrize(
    ("forwards", "share"),
    [({"target": 1.5, "drafter": 0.3}, 0.1), ({"target": 2.0}, 0.0), ({}, 1.0)],
)
def test_the_overhead_is_the_share_outside_the_forward_passes(
    forwards: dict[str, float], share: float
) -> None:
    assert Spent(total=2.0, parts={}, forwards=forwards).overhead == pytest.approx(share)


def test_each_way_of_decoding_has_its_own_share_and_parts() -> None:
    target = TargetAdapter(tiny_llama())
    subject = ProfilingSubject(target, tiny_drafter(target), [[1, 2, 3]], Effort(1, 12, 1))
    (figure,) = measure_overhead(subject).values()
    assert figure.details.keys() == {"greedy", "sampled", "autoregressive"}
    assert figure.interval.value == figure.details["greedy"]["share"]["value"]
    for found in figure.details.values():
        assert 0 < found["share"]["value"] < 1
        assert sum(found["milliseconds"]["forwards"].values()) < found["milliseconds"]["step"]
    assert figure.details["autoregressive"]["milliseconds"]["forwards"].keys() == {
        "target",
        "logits",
    }


def test_nested_forwards_are_watched_once_and_can_be_replayed() -> None:
    target = TargetAdapter(tiny_llama())
    drafter = tiny_drafter(target)
    cache = target.new_cache(1, 4)
    recorder, stopwatch = Recorder(), Stopwatch()
    for around in (recorder, stopwatch):
        with watched(target, drafter, around), torch.inference_mode():
            output = target.forward(chain_step(torch.tensor([[1, 2]]), 0), cache)
            logits = target.logits(output.features)
            _encode(drafter, drafter.state_sources.read(cache, torch.tensor([[0, 1]])))
    assert set(stopwatch.seconds) == {"target", "logits", "memory"}
    assert len(recorder.calls) == 3
    with torch.inference_mode():
        assert torch.equal(recorder.calls[1](), logits)
    assert "logits" not in vars(target)


def _encode(drafter: JakiroDrafter, state: TargetState) -> None:
    drafter.encode_memory(state, torch.tensor([[0, 1]]))
