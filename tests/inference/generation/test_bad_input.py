"""Requests that cannot be decoded get a clear error, before any work if that is possible."""

from collections.abc import Callable
from dataclasses import replace
from threading import Thread
from typing import Any

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama
from helpers.tokenizers import tiny_tokenizer
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxTimeCriteria,
    StoppingCriteriaList,
)

from inference import SpeculativeDecoder
from inference.draft_tree import DraftTree
from inference.drafters.trained.drafter import TrainedSession
from inference.engine.request import StopRule
from inference.generation.prompts import encode_prompt
from inference.protocol import Budget
from inference.sampling.random_numbers import StepRandom
from inference.trees.shape import TreeShape
from jakiro.errors import DraftError, NumericalError, PromptError
from jakiro.target.adapter import TargetAdapter

TREES = {
    "deterministic": TreeShape(children=4, breadth=3, num_nodes=12),
    "sampled": TreeShape(children=3, breadth=2, sampled=True),
}


def _decoder(name: str = "deterministic", vocab: int = 11) -> SpeculativeDecoder:
    model = tiny_llama(vocab=vocab)
    return SpeculativeDecoder(model, tiny_drafter(TargetAdapter(model)), tree=TREES[name])


class Forbid(LogitsProcessor):
    """A processor that leaves no token for position 5 and all later positions."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] < 5:
            return scores
        return torch.full_like(scores, float("-inf"))


@pytest.mark.parametrize(
    ("temperature", "fault"), [(0.0, float("nan")), (1.0, float("nan")), (1.0, float("inf"))]
)
def test_logits_that_are_not_finite_are_an_error_that_names_the_target(
    temperature: float, fault: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = _decoder()
    original = TargetAdapter.logits

    def broken(self: TargetAdapter, features: Tensor) -> Tensor:
        logits = original(self, features).clone()
        logits[..., 3] = fault
        return logits

    monkeypatch.setattr(TargetAdapter, "logits", broken)
    with pytest.raises(NumericalError, match="target's logits for position 3"):
        decoder.generate([1, 2, 3], max_new_tokens=5, temperature=temperature, seed=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_processors_that_leave_no_token_are_an_error_that_names_them(temperature: float) -> None:
    processors = LogitsProcessorList([Forbid()])
    with pytest.raises(NumericalError, match="processors leave no token for position 5"):
        _decoder().generate(
            [1, 2, 3],
            max_new_tokens=9,
            temperature=temperature,
            seed=0,
            logits_processor=processors,
        )


@pytest.mark.parametrize(("wrong", "temperature"), [(-1, 0.0), (11, 1.0)])
def test_drafts_that_are_no_tokens_are_an_error(
    wrong: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = TrainedSession.propose

    def foreign(self: TrainedSession, budget: Budget, random: StepRandom) -> DraftTree:
        tree = original(self, budget, random)
        return replace(tree, token_ids=torch.full_like(tree.token_ids, wrong))

    monkeypatch.setattr(TrainedSession, "propose", foreign)
    with pytest.raises(DraftError, match=f"ids from 0 to 10; got: {wrong}"):
        _decoder().generate([1, 2, 3], max_new_tokens=9, temperature=temperature, seed=0)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, 999], "ids outside the target's vocabulary.*got: 999"),
        ([1, -2], "ids outside the target's vocabulary"),
        (torch.ones(2, 3, dtype=torch.long), "one prompt at a time"),
        (torch.ones(1, 3), "integer ids"),
        ("half \ud800 a pair", "invalid character.*ud800"),
        ([{"role": "user", "content": "a"}], r"chat template rejects.*division by zero"),
        ({"role": "user", "content": "Why?"}, r"a list of chat messages.*got: a dict"),
        (3, r"a list of chat messages.*got: a int"),
    ],
)
def test_unusable_prompts_are_refused(prompt: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        encode_prompt(prompt, tiny_tokenizer("{{ 1 / 0 }}"), 300)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_length": 3}, "max_length|max_new_tokens"),
        ({"max_tokens": 3}, r"max_tokens.*; remedy: use its names .*max_new_tokens"),
        ({"temperature": 0, "do_sample": True}, "greedy decoding, leave do_sample out"),
        ({"stop": ["x"]}, r"stop_strings \(not stop\)"),
    ],
    ids=str,
)
def test_wrong_arguments_are_answered_with_what_was_meant(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(PromptError, match=message):
        SpeculativeDecoder(tiny_llama(vocab=11)).generate([1, 2, 3], **arguments)


@pytest.mark.parametrize("mask", [[[1, 0, 1]], [[0, 0, 0]]], ids=str)
def test_masks_that_are_not_padding_are_refused(mask: list[list[int]]) -> None:
    with pytest.raises(PromptError, match="mask"):
        _decoder().generate_batch(torch.tensor([[1, 2, 3]]), attention_mask=torch.tensor(mask))


def test_a_batch_with_one_prompt_too_long_is_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = _decoder()
    monkeypatch.setattr(TargetAdapter, "forward", _must_not_run)
    with pytest.raises(PromptError, match=r"prompt 1 .* at most 128 positions.*120 prompt tokens"):
        decoder.generate_batch([[1, 2], [1] * 120], max_new_tokens=9)


def test_duplicate_stop_strings_are_one_and_empty_ones_are_refused() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_llama(vocab=len(tokenizer))
    decoder = SpeculativeDecoder(model, tokenizer=tokenizer)
    full = decoder.generate("def", max_new_tokens=20)
    pieces = [tokenizer.decode([token]) for token in full.new_token_ids]
    stop = next(piece for piece in pieces[3:] if piece.isascii())
    once = decoder.generate("def", max_new_tokens=20, stop_strings=[stop])
    twice = decoder.generate("def", max_new_tokens=20, stop_strings=[stop] * 2)
    assert twice.new_token_ids == once.new_token_ids
    assert len(once.new_token_ids) < 20
    with pytest.raises(PromptError, match="stop string is empty"):
        decoder.generate("def", stop_strings=[""])


def test_stop_strings_of_the_target_itself_count_unless_others_are_given() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_llama(vocab=len(tokenizer))
    decoder = SpeculativeDecoder(model, tokenizer=tokenizer)
    full = decoder.generate("def", max_new_tokens=20).new_token_ids
    pieces = [tokenizer.decode([token]) for token in full]
    early, late = (next(p for p in pieces[n:] if p.isascii() and p.strip()) for n in (3, 8))
    one, other = (
        decoder.generate("def", max_new_tokens=20, stop_strings=[stop]).new_token_ids
        for stop in (early, late)
    )
    model.generation_config.stop_strings = [early]
    assert decoder.generate("def", max_new_tokens=20).new_token_ids == one
    config = GenerationConfig(max_new_tokens=20)
    assert decoder.generate("def", generation_config=config).new_token_ids == one
    arguments = {"max_new_tokens": 20, "stop_strings": late}
    assert decoder.generate("def", **arguments).new_token_ids == other
    for none in (None, []):
        arguments["stop_strings"] = none
        assert decoder.generate("def", **arguments).new_token_ids == full


def test_time_that_is_up_ends_the_generation() -> None:
    output = _decoder().generate([1, 2, 3], max_new_tokens=100, max_time=1e-9)
    assert len(output.new_token_ids) == 1
    rule = StopRule(StoppingCriteriaList([MaxTimeCriteria(1e9)]), torch.device("cpu"))
    assert not rule([1, 2])


@pytest.mark.slow
def test_one_decoder_serves_many_threads() -> None:
    decoder = _decoder()
    prompts = [[1 + n, 2, 3] for n in range(6)]
    expected = [decoder.generate(prompt, max_new_tokens=25).new_token_ids for prompt in prompts]
    got: dict[int, list[int]] = {}

    def work(index: int) -> Callable[[], None]:
        def run() -> None:
            output = decoder.generate(prompts[index], max_new_tokens=25)
            got[index] = output.new_token_ids

        return run

    threads = [Thread(target=work(index)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[index] for index in range(len(prompts))] == expected


def _must_not_run(*_: object) -> None:
    raise AssertionError("work was done")


def test_what_a_tokenizer_returns_is_a_prompt() -> None:
    tokenizer = tiny_tokenizer()
    decoder = SpeculativeDecoder(tiny_llama(vocab=len(tokenizer)), tokenizer=tokenizer)
    expected = decoder.generate("a main", max_new_tokens=4).new_token_ids
    inputs = tokenizer("a main", return_tensors="pt")
    assert decoder.generate(**inputs, max_new_tokens=4).new_token_ids == expected
    assert decoder.generate(inputs, max_new_tokens=4).new_token_ids == expected
    assert decoder.generate(tokenizer("a main"), max_new_tokens=4).new_token_ids == expected
    ids = tokenizer("a main")["input_ids"]
    padded = {"input_ids": [[0, *ids]], "attention_mask": [[0, *([1] * len(ids))]]}
    assert decoder.generate(padded, max_new_tokens=4).new_token_ids == expected
    with pytest.raises(PromptError, match="got: no prompt"):
        decoder.generate(max_new_tokens=4)
    with pytest.raises(PromptError, match="one prompt at a time"):
        decoder.generate(input_ids=torch.ones(2, 3, dtype=torch.long))


def test_do_sample_beside_a_temperature_means_what_it_means_in_transformers() -> None:
    decoder = SpeculativeDecoder(tiny_llama(vocab=30))
    greedy, sampled = (
        decoder.generate([1, 2, 3], max_new_tokens=8, temperature=temperature, seed=0).new_token_ids
        for temperature in (0, 1.5)
    )
    assert greedy != sampled
    for is_sampled, temperature, expected in (
        (False, 0, greedy),
        (False, 1.5, greedy),
        (True, 1.5, sampled),
    ):
        selection = {"do_sample": is_sampled, "temperature": temperature, "seed": 0}
        output = decoder.generate([1, 2, 3], max_new_tokens=8, **selection)
        assert output.new_token_ids == expected


def test_streaming_without_a_tokenizer_is_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = _decoder()
    monkeypatch.setattr("inference.decoder.prepare_requests", _must_not_run)
    with pytest.raises(PromptError, match=r"no tokenizer.*streamed text.*pass tokenizer="):
        decoder.stream([1, 2, 3])
