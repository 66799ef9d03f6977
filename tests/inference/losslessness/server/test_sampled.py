"""Tokens of sampled texts are read from what a server says about them."""

import pytest
import torch
from helpers.models import tiny_llama
from helpers.tokenizers import tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from inference.client.answer import ServerAnswer
from inference.generation.streaming import REPLACEMENT
from inference.losslessness.reference import Reference
from inference.losslessness.server.records import ServerVerifySettings
from inference.losslessness.server.sampled import check_samples, names_tokens
from jakiro.errors import ResourceError

LENGTH, SAMPLES = 3, 400
PROMPT = [70, 71]
SETTINGS = ServerVerifySettings(samples=SAMPLES, sample_length=LENGTH, top_k=6)
THRESHOLD = 0.0005


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


def _sampled(
    tokenizer: PreTrainedTokenizerFast, temperature: float, length: int, has_names: bool
) -> list[ServerAnswer]:
    """Return answers that are sampled with transformers."""
    torch.manual_seed(3)
    ids = torch.tensor([PROMPT] * SAMPLES)
    sampled = tiny_llama(vocab=300).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        max_new_tokens=length,
        temperature=temperature,
        top_k=6,
        pad_token_id=0,
    )
    return [
        ServerAnswer(
            200,
            tokenizer.decode(tokens, skip_special_tokens=True),
            [tokenizer.decode([token]) for token in tokens] if has_names else [],
            "length",
        )
        for tokens in sampled[:, len(PROMPT) :].tolist()
    ]


@pytest.mark.parametrize("has_names", [True, False])
def test_samples_of_the_target_pass_and_others_do_not(
    tokenizer: PreTrainedTokenizerFast, has_names: bool
) -> None:
    model = tiny_llama(vocab=300)
    length = LENGTH if has_names else 1
    results = []
    for temperature in (1.0, 0.5):
        answers = _sampled(tokenizer, temperature, length, has_names)
        checks = check_samples(model, tokenizer, PROMPT, answers, SETTINGS, 1, THRESHOLD)
        names = [check.name for check in checks]
        assert names[0] == "sequence distribution"
        assert ("token ranks" in names) is has_names
        assert names[-1] == "impossible tokens"
        assert checks[-1].passed
        results.append(checks[0].passed)
    assert results == [True, False]


def test_tokens_that_the_target_excludes_are_impossible(tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny_llama(vocab=300)
    ((_, probs),) = Reference(model, PROMPT, SETTINGS.sampling).distributions([()])
    names = [tokenizer.decode([token]) for token in range(300)]
    excluded = next(n for n in range(260, 300) if probs[n] == 0 and names.count(names[n]) == 1)
    answers = _sampled(tokenizer, 1.0, LENGTH, has_names=True)
    answers[0].tokens[0] = names[excluded]
    *_, support = check_samples(model, tokenizer, PROMPT, answers, SETTINGS, 1, THRESHOLD)
    assert not support.passed


def test_tokens_after_an_ambiguous_one_are_left_out(tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny_llama(vocab=300)
    answers = [ServerAnswer(200, "", [REPLACEMENT, "a", "b"], "length") for _ in range(50)]
    *_, support = check_samples(model, tokenizer, PROMPT, answers, SETTINGS, 1, THRESHOLD)
    assert support.tokens == 50


@pytest.mark.parametrize("names", [["a", "</s>"], ["a"]])
def test_the_end_of_a_text_may_have_a_name_or_not(
    tokenizer: PreTrainedTokenizerFast, names: list[str]
) -> None:
    model = tiny_llama(vocab=300, eos_token_id=0)
    answers = [ServerAnswer(200, "a", list(names), "stop") for _ in range(50)]
    *_, support = check_samples(model, tokenizer, PROMPT, answers, SETTINGS, 1, THRESHOLD)
    assert support.tokens == 100


def test_names_that_the_target_does_not_know_are_refused(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    answers = [ServerAnswer(200, "Ġa", ["Ġa nonsense"], "length")]
    with pytest.raises(ResourceError, match="tokens are not those of the target"):
        check_samples(tiny_llama(300), tokenizer, PROMPT, answers, SETTINGS, 1, THRESHOLD)


def test_a_server_names_tokens_if_every_answer_that_has_some_names_them() -> None:
    named = ServerAnswer(200, "a", ["a"], "length")
    assert names_tokens([named, ServerAnswer(200, "", [], "stop")])
    assert not names_tokens([named, ServerAnswer(200, "a", [], "length")])
    assert not names_tokens([ServerAnswer(200, "", [], "stop")])
