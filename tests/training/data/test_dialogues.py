"""Dialogues give the same results in a shared batch as alone, and the batch stays full."""

import itertools
from typing import Any

import pytest
from helpers.models import tiny_llama
from transformers import LlamaForCausalLM

from inference import SpeculativeDecoder
from inference.drafters.lookup import LookupDrafter, LookupSettings
from inference.engine.loop import DecodeRun
from inference.protocol import Drafter
from training.data.dialogues import Dialogue, Turn, run_dialogues

DRAFTERS: dict[str, Drafter | None] = {
    "none": None,
    "lookup": LookupDrafter(LookupSettings(num_nodes=6, depth=3)),
}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(vocab=11)


def _dialogue(number: int) -> Dialogue[list[list[int]]]:
    """Ask up to three questions; each prompt contains the answers so far."""
    prompt, answers = [1 + number % 9], []
    for turn in range(number % 4):
        temperature = 0.0 if number % 2 else 0.9
        output = yield Turn(prompt, 100 * number + turn, temperature, {"max_new_tokens": 3 + turn})
        answers.append(output.new_token_ids)
        prompt = [*prompt, *output.new_token_ids, 7]
    return answers


def _alone(decoder: SpeculativeDecoder, number: int) -> list[list[int]]:
    dialogue = _dialogue(number)
    try:
        turn = next(dialogue)
        while True:
            options: dict[str, Any] = {"seed": turn.seed, "temperature": turn.temperature}
            turn = dialogue.send(decoder.generate(turn.prompt, **options, **turn.options))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("drafter", "batch_size"), [("none", 3), ("lookup", 1), ("lookup", 3), ("none", 40)]
)
def test_results_are_those_of_the_dialogues_alone_in_order(
    model: LlamaForCausalLM, drafter: str, batch_size: int
) -> None:
    decoder = SpeculativeDecoder(model, DRAFTERS[drafter], tree="fixed")
    results = list(run_dialogues(decoder, map(_dialogue, range(13)), batch_size))
    assert results == [_alone(decoder, number) for number in range(13)]


def test_a_batch_never_has_more_dialogues_than_allowed(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    original = DecodeRun.step

    def noted(self: DecodeRun) -> Any:
        sizes.append(len(self.live))
        return original(self)

    monkeypatch.setattr(DecodeRun, "step", noted)
    decoder = SpeculativeDecoder(model)
    endless = map(_dialogue, itertools.count(1))
    results = run_dialogues(decoder, endless, 5)
    assert len(list(itertools.islice(results, 30))) == 30
    results.close()
    assert max(sizes) <= 5
    assert sum(sizes) / len(sizes) > 4
