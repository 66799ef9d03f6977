"""Requests that join and leave a lane with recorded steps get the same tokens as alone."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from helpers.lanes import Work, finish, lane_of, played, request_of, start
from helpers.models import tiny_drafter, tiny_llama
from helpers.quick import mostly_slow
from helpers.recordings import Replayed
from transformers import LlamaForCausalLM

from inference import SpeculativeDecoder
from inference.engine import captured, device_step
from inference.engine.captured import FILLED, CapturedSteps
from inference.engine.lane import Lane
from inference.engine.request import SequenceState
from inference.serving.engine_thread import EngineThread
from inference.trees.shape import TreeShape
from jakiro.errors import NumericalError
from jakiro.target.adapter import TargetAdapter

GREEDY = {"temperature": 0}
SAMPLED = {"temperature": 0.8}
TREES = {
    "deterministic": TreeShape(children=2, breadth=2, num_nodes=6),
    "sampled": TreeShape(children=3, breadth=2, sampled=True),
}


@pytest.fixture(autouse=True)
def _replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_step, "RecordedFunction", Replayed)
    monkeypatch.setattr(captured, "STRIDE", 64)
    monkeypatch.setattr("helpers.lanes.Lane", partial(Lane, captured=True))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(vocab=11)


def _decoder(model: LlamaForCausalLM, tree: str | None = "deterministic") -> SpeculativeDecoder:
    if tree is None:
        return SpeculativeDecoder(model)
    return SpeculativeDecoder(model, tiny_drafter(TargetAdapter(model)), tree=TREES[tree])


def _works(options: dict[str, Any], count: int = 8) -> list[Work]:
    return [
        Work([1 + index, 2, 3 + index % 2], index, {**options, "max_new_tokens": 6 + 3 * index})
        for index in range(count)
    ]


def _started(
    decoder: SpeculativeDecoder, works: list[Work], places: int
) -> tuple[Lane, list[SequenceState]]:
    """Return a lane in which all requests have a place."""
    states = [SequenceState.of(index, request_of(decoder, own)) for index, own in enumerate(works)]
    lane = lane_of(decoder, states[0].request, places)
    for state in states:
        start(lane, state)
    return lane, states


@pytest.fixture
def batch_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The batch size of each step."""
    sizes: list[int] = []
    original = CapturedSteps._start

    def noted(self: CapturedSteps, *args: Any) -> None:
        sizes.append(len(self.sampling.each))
        original(self, *args)

    monkeypatch.setattr(CapturedSteps, "_start", noted)
    return sizes


@pytest.mark.parametrize("seed", mostly_slow(range(4), quick=[1]))
@pytest.mark.parametrize(
    ("tree", "options"),
    [
        (None, GREEDY),
        pytest.param("deterministic", GREEDY, marks=pytest.mark.slow),
        ("sampled", SAMPLED),
    ],
    ids=["none", "greedy", "sampled"],
)
def test_requests_that_join_leave_and_are_cancelled_get_the_same_tokens_as_alone(
    model: LlamaForCausalLM,
    tree: str | None,
    options: dict[str, Any],
    seed: int,
    batch_sizes: list[int],
) -> None:
    decoder, works = _decoder(model, tree), _works(options)
    cancelled = {2: 4, 5: 1}
    states = played(decoder, works, cancelled, seed)
    for index, (work, state) in enumerate(zip(works, states, strict=True)):
        alone = work.alone(decoder).new_token_ids
        if index in cancelled:
            assert cancelled[index] <= len(state.new_token_ids)
            alone = alone[: len(state.new_token_ids)]
        assert state.new_token_ids == alone
    assert {1, 2, 3} >= set(batch_sizes) > {1}


def test_few_steps_are_recorded_for_any_number_of_sequences(
    model: LlamaForCausalLM, batch_sizes: list[int]
) -> None:
    decoder = _decoder(model)
    works = _works(GREEDY)[::2]
    lane, states = _started(decoder, works, places=4)
    finish(lane)
    assert {4, 2} <= set(batch_sizes) <= {4, 2, 1}
    assert lane.captured is not None
    assert len(lane.captured.recorded) == len(set(batch_sizes))
    for work, state in zip(works, states, strict=True):
        assert state.new_token_ids == work.alone(decoder).new_token_ids


def test_sequences_that_fill_a_batch_neither_grow_nor_change_others(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, works = _decoder(model), _works(GREEDY, 3)
    expected = [work.alone(decoder).new_token_ids for work in works]
    lane, states = _started(decoder, works, places=4)
    original = CapturedSteps._start
    lengths = set()

    def planted(self: CapturedSteps, *args: Any) -> None:
        count = len(lane.live)
        lengths.update(self.rows.base_length[count:].tolist())
        for block in self.context.cache._all_blocks:
            block[:, count:] = 1e4
        original(self, *args)

    monkeypatch.setattr(CapturedSteps, "_start", planted)
    finish(lane)
    assert lengths == {FILLED}
    assert [state.new_token_ids for state in states] == expected


def test_slots_after_the_last_token_change_nothing(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, works = _decoder(model), _works(GREEDY, 2)
    expected = [work.alone(decoder).new_token_ids for work in works]
    lane, states = _started(decoder, works, places=2)
    original = CapturedSteps._start

    def planted(self: CapturedSteps, *args: Any) -> None:
        slots = torch.arange(self.context.cache.capacity)
        lengths = self.rows.base_length[: len(self.sampling.each)]
        is_free = (slots >= lengths[:, None])[None, :, None, :, None]
        for block in self.context.cache._all_blocks:
            block.masked_fill_(is_free, 1e4)
        original(self, *args)

    monkeypatch.setattr(CapturedSteps, "_start", planted)
    finish(lane)
    assert [state.new_token_ids for state in states] == expected


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_sequence_without_finite_logits_fails_alone(
    model: LlamaForCausalLM, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = _decoder(model, "sampled" if options is SAMPLED else "deterministic")
    works = _works(options, 3)
    expected = [work.alone(decoder).new_token_ids for work in works]
    lane, states = _started(decoder, works, places=4)
    for _ in range(2):
        lane.step()
    before = list(states[1].new_token_ids)
    logits = decoder.target.logits

    def poisoned(features: torch.Tensor) -> torch.Tensor:
        found = logits(features)
        if len(features) == 4:  # not those of the drafter
            found[1] = float("nan")
        return found

    monkeypatch.setattr(decoder.target, "logits", poisoned)
    while not states[1].is_finished:
        lane.step()
    monkeypatch.undo()
    finish(lane)
    assert isinstance(states[1].error, NumericalError)
    assert expected[1][: len(states[1].new_token_ids)] == states[1].new_token_ids
    assert len(states[1].new_token_ids) >= len(before)
    assert [states[index].new_token_ids for index in (0, 2)] == [expected[0], expected[2]]
    lane.close()


def test_a_step_under_way_goes_on_unless_a_sequence_joins_or_leaves(
    model: LlamaForCausalLM,
) -> None:
    decoder, works = _decoder(model), _works(GREEDY, 3)
    lane, states = _started(decoder, works[:2], places=3)
    lane.step()
    assert lane.captured is not None
    unread = lane.captured.unread
    assert unread is not None
    waiting = SequenceState.of(2, request_of(decoder, works[2]))
    lane.remove([waiting])  # which has no place yet
    short = Work([5, 6], 0, {**GREEDY, "max_new_tokens": 1})
    start(lane, SequenceState.of(3, request_of(decoder, short)))
    assert lane.captured.unread is unread
    start(lane, waiting)
    assert lane.captured.unread is None
    finish(lane)
    for work, state in zip(works, [*states, waiting], strict=True):
        assert state.new_token_ids == work.alone(decoder).new_token_ids


@pytest.mark.slow
def test_an_engine_with_captured_steps_gives_the_same_tokens(model: LlamaForCausalLM) -> None:
    drafter = tiny_drafter(TargetAdapter(model))
    decoder = SpeculativeDecoder(model, drafter, captured=True)
    ordinary = SpeculativeDecoder(model, drafter, tree="fixed")
    requests = [
        ([1, 2, 3], {"temperature": 0, "max_new_tokens": 20}),
        ([4, 5], {"temperature": 0, "max_new_tokens": 9}),
        ([6, 7, 8], {"temperature": 0, "max_new_tokens": 14}),
    ]
    with EngineThread(decoder, places=2, capacity=64) as engine:
        jobs = [engine.submit(prompt, **options) for prompt, options in requests]
        texts = [[token for step in job for token in step.token_ids] for job in jobs]
    for (prompt, options), text in zip(requests, texts, strict=True):
        assert text == ordinary.generate(prompt, **options).new_token_ids
