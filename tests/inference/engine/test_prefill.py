"""Prefill reads prompts of different lengths in chunks and selects the first new tokens."""

import pytest
import torch
from helpers.models import tiny_llama
from transformers import LogitsProcessorList, StoppingCriteriaList

from inference.engine.context import Context
from inference.engine.prefill import Prefill
from inference.engine.request import Request, SequenceState, StopRule
from inference.sampling.options import Sampling
from jakiro.target.adapter import TargetAdapter

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [3]]
GREEDY = Sampling(LogitsProcessorList(), do_sample=False)


def _prefill(target: TargetAdapter, prompts: list[list[int]]) -> Prefill:
    stop = StopRule(StoppingCriteriaList(), target.device)
    states = [
        SequenceState.of(index, Request(prompt, GREEDY, stop, len(prompt) + 1))
        for index, prompt in enumerate(prompts)
    ]
    return Prefill(Context(target, None, GREEDY, len(prompts), 16), states)


@torch.inference_mode()
@pytest.mark.parametrize(("chunk", "num_chunks"), [(512, 1), (7, 1), (3, 3), (1, 7)])
def test_prompts_are_complete_after_their_last_chunk(
    chunk: int, num_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TargetAdapter(tiny_llama(vocab=11))
    expected = [_prefill(target, [prompt]) for prompt in PROMPTS]
    alone = []
    for prefill in expected:
        prefill.read_chunk()
        alone += [result.next_token for result in prefill.select_first(prefill.sequences)]
    monkeypatch.setattr("inference.engine.context.PREFILL_CHUNK", chunk)
    together = _prefill(target, PROMPTS)
    for number in range(num_chunks):
        assert not together.is_complete, number
        together.read_chunk()
    assert together.is_complete
    assert together.context.lengths == [3, 7, 1]
    assert [result.next_token for result in together.select_first(together.sequences)] == alone
