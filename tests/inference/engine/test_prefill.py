"""Prefill reads prompts of different lengths in chunks and selects the first new tokens."""

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from transformers import LogitsProcessorList, StoppingCriteriaList

from inference.drafters.trained.drafter import TrainedDrafter
from inference.engine.context import Context
from inference.engine.prefill import Prefill
from inference.engine.request import Request, SequenceState, StopRule
from inference.protocol import Drafter
from inference.sampling.options import Sampling
from inference.trees.shape import TreeShape
from jakiro.target.adapter import TargetAdapter
from jakiro.target.cache import SlotCache, StateSource
from jakiro.target.step import StepInput, StepOutput

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [3]]
GREEDY = Sampling(LogitsProcessorList(), do_sample=False)


def _prefill(
    target: TargetAdapter, prompts: list[list[int]], drafter: Drafter | None = None
) -> Prefill:
    stop = StopRule(StoppingCriteriaList(), target.device)
    states = [
        SequenceState.of(index, Request(prompt, GREEDY, stop, len(prompt) + 1))
        for index, prompt in enumerate(prompts)
    ]
    return Prefill(Context(target, drafter, GREEDY, len(prompts), 16), states)


@torch.inference_mode()
@pytest.mark.parametrize(("long", "expected_rows"), [(64, [3, 2, 1, 1]), (2, [1] * 7)])
def test_sequences_take_no_part_in_chunks_after_their_prompts(
    long: int, expected_rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TargetAdapter(tiny_llama(vocab=11))
    settings = tiny_settings(trunk={"kind": "hybrid"}, source="hidden")
    drafter = TrainedDrafter(tiny_drafter(target, settings), target, TreeShape())
    monkeypatch.setattr("inference.engine.context.PREFILL_CHUNK", 2)
    monkeypatch.setattr("inference.engine.context.LONG_ON_CPU", long)
    together = _prefill(target, PROMPTS, drafter)
    forward, num_rows = target.forward, []

    def counted(step: StepInput, cache: SlotCache) -> StepOutput:
        num_rows.append(len(step.token_ids))
        return forward(step, cache)

    monkeypatch.setattr(target, "forward", counted)
    while not together.is_complete:
        together.read_chunk()
    assert num_rows == expected_rows  # of 3, 7 and 1 tokens
    cache = together.context.cache
    assert cache.hidden_states
    for index, prompt in enumerate(PROMPTS):
        alone = _prefill(target, [prompt], drafter)
        while not alone.is_complete:
            alone.read_chunk()
        slots = torch.arange(len(prompt))[None]
        for kind, layers in (("kv", (0, 1)), ("hidden", cache.hidden_states)):
            source = StateSource(kind, layers)
            expected = alone.context.cache.state(slots, source)
            got = cache.state(slots.expand(len(PROMPTS), -1), source)[index : index + 1]
            torch.testing.assert_close(got, expected)
