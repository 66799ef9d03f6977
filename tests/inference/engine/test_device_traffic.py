"""Counts the copies between host and device in decoding steps, as if the CPU were a GPU."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from helpers.lanes import Work, lane_of, request_of, start
from helpers.models import tiny_drafter, tiny_llama
from helpers.recordings import Replayed
from torch import Tensor

from inference import SpeculativeDecoder
from inference.drafters.trained.drafter import TrainedDrafter
from inference.engine import accept_batched, acceptance, device_step
from inference.engine.lane import Lane
from inference.engine.loop import DecodeRun
from inference.engine.request import OutputOptions, SequenceState
from inference.generation.preparation import prepare_requests
from inference.trees.shape import TreeShape
from jakiro.target.adapter import TargetAdapter

READS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
PROMPTS = ([1, 2, 3], [4, 5], [6, 7, 8, 9], [3, 1])


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count every copy that would cross from one side to the other."""
    counts: Counter[str] = Counter()

    def counted(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            counts[kind] += 1
            return function(*args, **kwargs)

        return wrapper

    for name in READS:
        monkeypatch.setattr(Tensor, name, counted("reads", getattr(Tensor, name)))
    for name in ("tensor", "as_tensor", "from_numpy"):
        monkeypatch.setattr(torch, name, counted("uploads", getattr(torch, name)))
    return counts


SELECTIONS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True},
    "nucleus": {"do_sample": True, "top_p": 0.9, "temperature": 0.7},
}


@pytest.mark.parametrize(
    ("batch", "selection", "sampled_tree"),
    [(1, "greedy", False), (4, "sampled", True), (4, "nucleus", False), (1, "nucleus", True)],
)
@torch.inference_mode()
def test_a_decoding_step_reads_once_and_uploads_at_most_once(
    batch: int,
    selection: str,
    sampled_tree: bool,
    traffic: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = TargetAdapter(tiny_llama())
    shape = TreeShape(children=2, breadth=2, num_nodes=6, sampled=sampled_tree)
    drafter = TrainedDrafter(tiny_drafter(target), target, shape)
    monkeypatch.setattr(acceptance, "accepts_on_device", lambda *_: True)
    monkeypatch.setattr(accept_batched._Descent, "_is_over", lambda self: False)
    requests, _ = prepare_requests(
        target.model,
        PROMPTS[:batch],
        {"max_new_tokens": 24, **SELECTIONS[selection]},
        seed=0,
        max_position=target.spec.max_position,
    )
    run = DecodeRun(target, drafter, requests)
    per_step = []
    for number, _ in enumerate(run):
        if number > 1 and len(run.live) == batch:
            per_step.append(dict(traffic))
        traffic.clear()
    assert len(per_step) > 5
    expected_uploads = 1 if sampled_tree or selection != "greedy" else 0  # of random numbers
    assert {step.get("reads", 0) for step in per_step} == {1}
    assert {step.get("uploads", 0) for step in per_step} == {expected_uploads}


def test_details_of_all_sequences_are_read_together(
    traffic: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance, "accepts_on_device", lambda *_: True)
    decoder = SpeculativeDecoder(tiny_llama())
    asked = OutputOptions(raw_log_probs=True, num_likeliest=2)
    works = [Work(prompt, 0, {"temperature": 0, "max_new_tokens": 12}) for prompt in PROMPTS]
    requests = [replace(request_of(decoder, work), record=asked) for work in works]
    lane = lane_of(decoder, requests[0], places=4)
    for index, request in enumerate(requests):
        start(lane, SequenceState.of(index, request))
    lane.step()
    traffic.clear()
    steps = lane.step()
    assert all(step.details is not None and step.details.likeliest for step in steps)
    assert traffic["reads"] == 2  # the outcome, and the details
    assert traffic["uploads"] == 1  # the emitted tokens


@pytest.mark.parametrize(
    ("selection", "sampled_tree"), [("greedy", False), ("sampled", True), ("nucleus", False)]
)
def test_a_recorded_step_of_a_lane_reads_once_and_uploads_at_most_once(
    selection: str,
    sampled_tree: bool,
    traffic: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_step, "RecordedFunction", Replayed)
    monkeypatch.setattr(accept_batched._Descent, "_is_over", lambda self: False)
    monkeypatch.setattr("helpers.lanes.Lane", partial(Lane, captured=True))
    model = tiny_llama()
    shape = TreeShape(children=2, breadth=2, num_nodes=6, sampled=sampled_tree)
    decoder = SpeculativeDecoder(model, tiny_drafter(TargetAdapter(model)), tree=shape)
    options = SELECTIONS[selection] | {"max_new_tokens": 24}
    if not options.pop("do_sample"):
        options["temperature"] = 0
    works = [Work(prompt, 0, {"temperature": 1.0, **options}) for prompt in PROMPTS[:3]]
    lane = lane_of(decoder, request_of(decoder, works[0]), places=4)
    for index, work in enumerate(works):
        start(lane, SequenceState.of(index, request_of(decoder, work)))
    lane.step()  # prepares recorded steps
    per_step = []
    while lane.live and not any(state.is_finished for state in lane.live):
        traffic.clear()
        lane.step()
        per_step.append(dict(traffic))
    assert len(per_step) > 5
    expected_uploads = 1 if sampled_tree or selection != "greedy" else 0  # of random numbers
    assert {step.get("reads", 0) for step in per_step} == {1}
    assert {step.get("uploads", 0) for step in per_step[:-1]} == {expected_uploads}
