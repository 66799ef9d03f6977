"""Continuations join a lane together, without reading their prompt again, or not at all."""

from typing import Any

import pytest
import torch
from helpers.lanes import Work, finish, lane_of, read_chunk, request_of, requests_of, start
from helpers.models import tiny_drafter, tiny_llama
from transformers import LlamaForCausalLM

from inference import SpeculativeDecoder
from inference.drafters.base import TokenSession
from inference.drafters.lookup import LookupDrafter
from inference.drafters.small_lm import SmallLMDrafter, SmallLMSession
from inference.drafters.trained.drafter import TrainedDrafter, TrainedSession
from inference.engine.context import Context
from inference.engine.request import SequenceState
from inference.trees.shape import TreeShape
from jakiro.target.adapter import TargetAdapter
from jakiro.target.sequence_storage import SequenceStorage
from jakiro.target.step import StepInput

SHAPE = TreeShape(children=3, breadth=2, sampled=True)
NEIGHBOUR = Work([1, 2, 3], 1, {"temperature": 0.8, "max_new_tokens": 20})
SEVERAL = Work([4, 5, 6, 7, 5, 6], 3, {"temperature": 0.8, "max_new_tokens": 14})


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(vocab=11)


def _decoder(model: LlamaForCausalLM, name: str) -> SpeculativeDecoder:
    if name == "trained":
        return SpeculativeDecoder(model, tiny_drafter(TargetAdapter(model)), tree=SHAPE)
    drafters: dict[str, Any] = {
        "none": lambda: None,
        "lookup": LookupDrafter,
        "small": lambda: SmallLMDrafter(tiny_llama(vocab=11, seed=7), model),
    }
    return SpeculativeDecoder(model, drafters[name](), tree="fixed")


def _continuations(decoder: SpeculativeDecoder, choices: int) -> list[SequenceState]:
    requests = requests_of(decoder, SEVERAL, choices)
    return [SequenceState.of(index, request) for index, request in enumerate(requests)]


PLACES: list[tuple[str, type, str]] = [
    ("trained", Context, "catch_up"),
    ("trained", TrainedSession, "append_sequences"),
    ("small", SmallLMSession, "append_sequences"),
    ("lookup", TokenSession, "append_sequences"),
    ("none", SequenceStorage, "append"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "owner", "method"), PLACES)
def test_without_memory_no_continuation_gets_a_place_and_the_others_go_on(
    model: LlamaForCausalLM,
    name: str,
    owner: type,
    method: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = _decoder(model, name)
    lane = lane_of(decoder, request_of(decoder, NEIGHBOUR), places=4)
    neighbour = SequenceState.of(0, request_of(decoder, NEIGHBOUR))
    start(lane, neighbour)
    lane.step()
    original, num_calls = getattr(owner, method), 0

    def planted(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise torch.OutOfMemoryError("no memory")
        return original(*args)

    states = _continuations(decoder, 2)
    prefill = lane.prefill_of(states)
    read_chunk(prefill)
    monkeypatch.setattr(owner, method, planted)
    try:
        lane.start(prefill, states)
    except torch.OutOfMemoryError:
        assert lane.live == [neighbour]
        assert lane.num_free == 3
    else:
        assert num_calls < 2
        lane.remove(states)
    monkeypatch.undo()
    assert not hasattr(prefill.context, "cache")
    again = _continuations(decoder, 2)
    start(lane, *again)
    finish(lane)
    assert neighbour.new_token_ids == NEIGHBOUR.alone(decoder).new_token_ids
    alone = decoder.generate_batch([SEVERAL.prompt] * 2, seed=SEVERAL.seed, **SEVERAL.options)
    assert [state.new_token_ids for state in again] == [own.new_token_ids for own in alone]


def test_four_continuations_encode_their_prompt_once_and_a_chunk_at_a_time(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.engine.context.PREFILL_CHUNK", 8)
    decoder = _decoder(model, "trained")
    work = SEVERAL._replace(prompt=[1 + index % 7 for index in range(30)])
    requests = requests_of(decoder, work, 4)
    states = [SequenceState.of(index, request) for index, request in enumerate(requests)]
    lane = lane_of(decoder, requests[0], places=4)
    encode = TrainedDrafter.encode_memory
    num_encoded = 0

    def counted(drafter: TrainedDrafter, output: Any, queries: Any = None) -> Any:
        nonlocal num_encoded
        step: StepInput = output.step
        num_encoded += step.token_ids.numel()
        return encode(drafter, output, queries)

    monkeypatch.setattr(TrainedDrafter, "encode_memory", counted)
    prefill = lane.prefill_of(states)
    per_turn = []
    while not prefill.is_complete:
        num_encoded = 0
        read_chunk(prefill)
        per_turn.append(num_encoded)
    num_encoded = 0
    lane.start(prefill, states)
    per_turn.append(num_encoded)
    others = len(states) - 1  # each of which encodes the last token of the prompt again
    assert sum(per_turn) == len(work.prompt) + others
    assert max(per_turn) <= 8 + others
    monkeypatch.undo()
    finish(lane)
    alone = decoder.generate_batch([work.prompt] * 4, seed=work.seed, **work.options)
    assert [state.new_token_ids for state in states] == [own.new_token_ids for own in alone]
