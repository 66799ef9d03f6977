"""Tokens of sampled texts are read from what a server says about them."""

import pytest
import torch
from helpers.models import tiny_llama
from helpers.tokenizers import tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from inference.client.answer import ServerAnswer
from inference.generation.incremental_text import REPLACEMENT
from inference.losslessness.reference import Reference
from inference.losslessness.server.records import ServerVerifySettings
from inference.losslessness.server.sampled import (
    NamedReference,
    TokenNames,
    check_samples,
    names_tokens,
)
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


def test_parts_of_characters_share_a_name_and_letters_do_not() -> None:
    tokenizer = tiny_tokenizer()
    names = TokenNames(tokenizer, 310, {0}, special=True)
    letter = tokenizer.convert_tokens_to_ids("a")
    assert names.token_of("a") == letter
    assert letter not in names.shared
    part = names.token_of(REPLACEMENT)
    assert part in names.shared
    assert (names.representatives == part).sum() > 100  # bytes that are no character of their own
    assert names.token_of("nothing like a token") is None
    assert (names.end, names.token_of("</s>")) == (0, 0)
    assert names.token_of("") in names.shared  # the tokens that the tokenizer does not know


def test_all_ends_of_texts_are_one_group() -> None:
    names = TokenNames(tiny_tokenizer(), 300, {0, 2}, special=True)
    assert names.end == names.token_of("</s>") == names.token_of("<assistant>") == 0
    assert names.representatives[:4].tolist() == [0, 1, 0, 3]
    assert 0 not in names.shared


@pytest.mark.parametrize("end", [0, 2])
def test_special_tokens_without_a_text_join_the_end(end: int) -> None:
    names = TokenNames(tiny_tokenizer(), 300, {end}, special=False)
    assert names.token_of("") == end
    assert names.representatives[:4].tolist() == [end] * 4


def test_probabilities_of_a_group_are_added() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_llama(vocab=300)
    names = TokenNames(tokenizer, 300, {0}, special=True)
    sampling = {"temperature": 1.0, "top_k": 0}
    ((_, own),) = Reference(model, [1, 2], sampling).distributions([()])
    reference = NamedReference(model, [1, 2], sampling, names)
    ((_, grouped),) = reference.distributions([()])
    part = names.token_of(REPLACEMENT)
    assert part is not None
    assert float(grouped.sum()) == pytest.approx(1.0)
    assert float(grouped[part]) == pytest.approx(float(own[names.representatives == part].sum()))
    alone = torch.tensor([token for token in range(300) if token not in names.shared])
    alone = alone[names.representatives[alone] == alone]
    assert torch.equal(grouped[alone], own[alone])
    assert reference.ends(part)
    assert not reference.ends(int(alone[5]))
