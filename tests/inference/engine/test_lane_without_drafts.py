"""Requests without drafts, beside others that are drafted for."""

from dataclasses import replace
from typing import Any

import pytest
from helpers.lanes import Work, finish, lane_of, request_of, start
from helpers.models import tiny_drafter, tiny_llama
from transformers import LlamaForCausalLM

from inference import SpeculativeDecoder
from inference.drafters.aded.drafter import AdedDrafter
from inference.drafters.combined.drafter import CombinedDrafter
from inference.drafters.lookup import LookupDrafter
from inference.drafters.trained.drafter import TrainedDrafter
from inference.engine.request import SequenceState
from inference.protocol import Drafter
from jakiro.target.adapter import TargetAdapter

KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9},
    {"temperature": 0.9, "repetition_penalty": 1.2},
]
NAMES = ["trained", "lookup", "trigrams", "pair"]


def _drafter(name: str, model: LlamaForCausalLM) -> Drafter:
    target = TargetAdapter(model)
    trained = TrainedDrafter.for_target(tiny_drafter(target), target)
    if name == "trained":
        return trained
    if name == "pair":
        return CombinedDrafter(trained, LookupDrafter())
    return LookupDrafter() if name == "lookup" else AdedDrafter()


def _played(name: str, options: dict[str, Any], without: set[int]) -> list[SequenceState]:
    """Decode three prompts together, the second of which joins later."""
    model = tiny_llama(vocab=11)
    decoder = SpeculativeDecoder(model, _drafter(name, model), tree="fixed")
    states = []
    for index in range(3):
        work = Work([2, 1, 2, 1 + index, 2], 7 + index, {**options, "max_new_tokens": 20})
        request = replace(request_of(decoder, work), drafts=index not in without)
        states.append(SequenceState.of(index, request))
    lane = lane_of(decoder, states[0].request)
    for state in states[::2]:
        start(lane, state)
    for _ in range(2):
        lane.step()
    start(lane, states[1])
    finish(lane)
    return states


def _autoregressive(options: dict[str, Any], index: int) -> list[int]:
    decoder = SpeculativeDecoder(tiny_llama(vocab=11), None, tree="fixed")
    work = Work([2, 1, 2, 1 + index, 2], 7 + index, {**options, "max_new_tokens": 20})
    return work.alone(decoder).new_token_ids


@pytest.mark.parametrize(
    ("name", "options"), list(zip(NAMES, [*KINDS, KINDS[1]], strict=True)), ids=NAMES
)
def test_they_get_the_tokens_of_autoregressive_decoding(name: str, options: dict[str, Any]) -> None:
    states = _played(name, options, {0, 1})
    for state in states[:2]:
        assert state.new_token_ids == _autoregressive(options, state.index)
        assert state.stats.target_forwards == state.stats.decoded
        assert state.stats.proposed_by_proposer.total() == 0
