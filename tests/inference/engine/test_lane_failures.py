"""A request that fails for any reason leaves its lane, and the others get their own tokens."""

from typing import Any

import pytest
import torch
from helpers.lanes import Work, finish, lane_of, request_of, start
from helpers.models import tiny_drafter, tiny_llama
from torch import Tensor
from transformers import (
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from inference import SpeculativeDecoder
from inference.drafters.trained.drafter import TrainedSession
from inference.engine import acceptance, batch
from inference.engine.lane import Lane
from inference.engine.request import SequenceState
from inference.trees.shape import TreeShape
from jakiro.errors import NumericalError, RequestError
from jakiro.target.adapter import TargetAdapter

PROMPTS = [[1, 2, 3], [4, 5, 6, 7], [3], [2, 1, 2]]
BAD = 2
SHAPE = TreeShape(children=3, breadth=2, sampled=True)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(vocab=11)


def _decoder(model: LlamaForCausalLM) -> SpeculativeDecoder:
    return SpeculativeDecoder(model, tiny_drafter(TargetAdapter(model)), tree=SHAPE)


def _works(**options: Any) -> list[Work]:
    return [
        Work(prompt, index, {"temperature": 0.8 + index / 10, "max_new_tokens": 16, **options})
        for index, prompt in enumerate(PROMPTS)
    ]


def _started(decoder: SpeculativeDecoder, works: list[Work]) -> tuple[Lane, list[SequenceState]]:
    requests = [request_of(decoder, work) for work in works]
    states = [SequenceState.of(index, request) for index, request in enumerate(requests)]
    lane = lane_of(decoder, requests[0], places=len(works))
    for state in states:
        start(lane, state)
    return lane, states


class Raises(LogitsProcessor):
    """Processor that raises an exception once a sequence has a number of tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] >= self.length:
            raise KeyError("no such token")
        return scores


class RaisesAtTheEnd(StoppingCriteria):
    """Criterion that raises an exception once a sequence has a number of tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if input_ids.shape[1] >= self.length:
            raise KeyError("no such text")
        return torch.tensor([False])


@pytest.mark.parametrize("part", ["processor", "criterion"])
def test_an_exception_in_the_code_of_a_request_ends_this_request_alone(
    model: LlamaForCausalLM, part: str
) -> None:
    decoder, works = _decoder(model), _works()
    alone = [work.alone(decoder).new_token_ids for work in works]
    length = len(PROMPTS[BAD]) + 4
    if part == "processor":
        works[BAD].options["logits_processor"] = LogitsProcessorList([Raises(length)])
    else:
        criteria = StoppingCriteriaList([RaisesAtTheEnd(length)])
        works[BAD].options["stopping_criteria"] = criteria
    lane, states = _started(decoder, works)
    errors = []
    while lane.live:
        errors += [(step.index, step.error) for step in lane.step() if step.error is not None]
    assert [index for index, _ in errors] == [BAD]
    assert isinstance(states[BAD].error, RequestError)
    assert isinstance(states[BAD].error.__cause__, KeyError)
    assert len(states[BAD].new_token_ids) <= 4
    for index, (state, expected) in enumerate(zip(states, alone, strict=True)):
        count = len(state.new_token_ids) if index == BAD else None
        assert state.new_token_ids == expected[:count]
    with pytest.raises(KeyError):  # a caller that decodes a prompt alone gets the exception itself
        works[BAD].alone(decoder)


@pytest.mark.parametrize("is_on_device", [True, False])
@pytest.mark.parametrize("name", ["all", "each"])
def test_logits_that_are_not_finite_end_their_sequence_alone_whatever_the_processors_are(
    model: LlamaForCausalLM, is_on_device: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance, "accepts_on_device", lambda *_: is_on_device)
    decoder = _decoder(model)
    works = _works(typical_p=0.95, **({"temperature": 0.9} if name == "all" else {}))
    alone = [work.alone(decoder).new_token_ids for work in works]
    lane, states = _started(decoder, works)
    num_calls = 0

    def planted(tree: Any, logits: Tensor, sequences: Any, random: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            logits[BAD] = torch.nan
        return acceptance.accept_trees(tree, logits, sequences, random)

    monkeypatch.setattr(batch, "accept_trees", planted)
    finish(lane)
    assert isinstance(states[BAD].error, NumericalError)
    for index, (state, expected) in enumerate(zip(states, alone, strict=True)):
        count = len(state.new_token_ids) if index == BAD else None
        assert state.new_token_ids == expected[:count]
    assert len(states[BAD].new_token_ids) < len(alone[BAD])


def test_nan_in_the_caches_of_a_drafter_does_not_reach_the_next_sequence() -> None:
    decoder = _decoder(tiny_llama(vocab=11, max_position_embeddings=512))
    long = Work([1, 2, 3] * 44, 1, {"temperature": 0.8, "max_new_tokens": 40})
    short = Work([4, 5, 6], 2, {"temperature": 0.8, "max_new_tokens": 20})
    lane = lane_of(decoder, request_of(decoder, long), places=2, capacity=180)
    states = [SequenceState.of(0, request_of(decoder, long)) for _ in range(2)]
    for state in states:
        start(lane, state)
    session = lane.context.session
    assert isinstance(session, TrainedSession)
    with torch.inference_mode():
        session.cache.layers[0]._tensors[0][1, :, 130:132] = torch.nan
    lane.step()
    assert all(state.error is None for state in states)
    lane.remove(states[1:])
    start(lane, next_one := SequenceState.of(0, request_of(decoder, short)))
    finish(lane)
    for state, work in ((states[0], long), (next_one, short)):
        alone = work.alone(decoder)
        assert state.new_token_ids == alone.new_token_ids
        assert state.stats.accepted == alone.stats.accepted
