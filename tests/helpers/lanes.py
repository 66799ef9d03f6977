"""Requests that join a lane and leave it, to be compared with the same requests alone."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

import torch

from inference import SpeculativeDecoder
from inference.engine.lane import Lane
from inference.engine.prefill import Prefill
from inference.engine.request import Request, SequenceState
from inference.generation.preparation import prepare_requests
from inference.outputs import GenerateOutput


class Work(NamedTuple):
    """A prompt to continue, and the options of `generate`."""

    prompt: list[int]
    seed: int
    options: dict[str, Any]

    def alone(self, decoder: SpeculativeDecoder) -> GenerateOutput:
        """Return the output of a decoder that decodes only this prompt."""
        return decoder.generate(self.prompt, seed=self.seed, **self.options)


def request_of(decoder: SpeculativeDecoder, work: Work) -> Request:
    """Return the request of a prompt with its own seed."""
    return requests_of(decoder, work, 1)[0]


def requests_of(decoder: SpeculativeDecoder, work: Work, choices: int) -> list[Request]:
    """Return requests for several continuations of a prompt."""
    options = dict(work.options)
    requests, _ = prepare_requests(
        decoder.target.model,
        [work.prompt] * choices,
        options,
        temperature=options.pop("temperature"),
        seed=work.seed,
        max_position=decoder.target.spec.max_position,
    )
    return requests


def lane_of(
    decoder: SpeculativeDecoder, request: Request, places: int = 3, capacity: int = 64
) -> Lane:
    """Return a lane for requests like the given one."""
    target, drafter = decoder.target, decoder.drafter
    return Lane(target, drafter, request.sampling, places, capacity, decoder.policy)


def start(lane: Lane, *states: SequenceState) -> Prefill:
    """Read a prompt at once, and let its continuations join."""
    prefill = lane.prefill_of(states)
    while not prefill.is_complete:
        read_chunk(prefill)
    lane.start(prefill, states)
    return prefill


def read_chunk(prefill: Prefill) -> None:
    """Read a chunk of a prompt."""
    with torch.inference_mode():
        prefill.read_chunk()


def finish(lane: Lane) -> None:
    """Decode until no sequence is left."""
    while lane.live:
        lane.step()


def played(
    decoder: SpeculativeDecoder,
    works: Sequence[Work],
    cancelled: Mapping[int, int],
    seed: int,
    places: int = 3,
) -> list[SequenceState]:
    """Let requests join a lane at random steps, and cancel some of them."""
    random = Random(seed)
    requests = [request_of(decoder, work) for work in works]
    states = [SequenceState.of(index, request) for index, request in enumerate(requests)]
    lane = lane_of(decoder, requests[0], places)
    waiting = list(states)
    while waiting or lane.live:
        while waiting and lane.num_free and (not lane.live or random.random() < 0.5):
            start(lane, waiting.pop(0))
        if lane.live:
            lane.step()
        lane.remove(
            [
                states[index]
                for index, count in cancelled.items()
                if len(states[index].new_token_ids) >= count
            ]
        )
    assert lane.num_free == places
    lane.close()
    return states
