"""Greedy texts of a server are compared with the target's tokens, near-ties included."""

import pytest
import torch
from helpers.models import tiny_llama
from helpers.tokenizers import tiny_tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from inference.client.answer import ServerAnswer, TokenUsage
from inference.generation.incremental_text import REPLACEMENT
from inference.losslessness.reference import Reference, Tokens
from inference.losslessness.server.greedy import compare_greedy, drafted_in
from inference.losslessness.server.records import GreedyTextCheck

LENGTH = 12
PROMPT = [70, 71]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(tiny_llama(vocab=300), PROMPT)


def _compare(
    reference: Reference,
    tokenizer: PreTrainedTokenizerFast,
    text: str,
    finish_reason: str = "length",
) -> GreedyTextCheck:
    usage = TokenUsage(2, LENGTH, 3, 9)
    answer = ServerAnswer(200, text, finish_reason=finish_reason, usage=usage)
    return compare_greedy([reference], [answer], tokenizer, LENGTH)


def _decoded(tokenizer: PreTrainedTokenizerFast, tokens: Tokens) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))


def test_equal_texts_pass(reference: Reference, tokenizer: PreTrainedTokenizerFast) -> None:
    text = _decoded(tokenizer, reference.greedy(LENGTH))
    check = _compare(reference, tokenizer, text)
    assert check.passed
    assert (check.prompts, check.tokens, check.drafted, check.differences) == (1, LENGTH, 3, ())
    assert "12 tokens equal, 3 tokens drafted; 0 differences, 0 near-ties" in str(check)
    assert _compare(reference, tokenizer, f" {text}").passed is not text.startswith(" ")


def test_the_first_difference_is_found(
    reference: Reference, tokenizer: PreTrainedTokenizerFast
) -> None:
    own = reference.greedy(LENGTH)
    letters = tokenizer.convert_tokens_to_ids(["q", "z"])
    other = next(token for token in letters if token != own[4])
    text = _decoded(tokenizer, (*own[:4], other, *own[5:]))
    check = _compare(reference, tokenizer, text)
    assert not check.passed
    assert check.tokens == 4
    (difference,) = check.differences
    assert (difference.prompt, difference.position) == (1, 5)
    assert (difference.target_token, difference.server_token) == (own[4], other)
    assert difference.gap is not None
    assert difference.gap > 0 == difference.rounding
    assert difference.server_text.startswith(tokenizer.decode([other]))
    assert "difference: prompt 1, new token 5" in check.details[0]


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_text_that_ends_early_is_a_difference(
    reference: Reference, tokenizer: PreTrainedTokenizerFast, reason: str
) -> None:
    own = reference.greedy(LENGTH)
    texts = [_decoded(tokenizer, own[:size]) for size in range(LENGTH)]
    kept = next(n for n in range(1, LENGTH) if REPLACEMENT not in texts[n][-1:])
    text = texts[kept]
    check = _compare(reference, tokenizer, text, reason)
    assert not check.passed
    (difference,) = check.differences
    assert difference.position == kept + 1
    assert difference.server_text == ""
    assert difference.gap is None  # this target has no token that ends a text


def test_the_end_of_a_text_must_be_the_targets_own(tokenizer: PreTrainedTokenizerFast) -> None:
    endless = Reference(tiny_llama(vocab=300), PROMPT)
    own = endless.greedy(LENGTH)
    size = next(n for n in range(3, LENGTH) if own[n] not in own[:n])
    reference = Reference(tiny_llama(vocab=300, eos_token_id=own[size]), PROMPT)
    assert reference.greedy(LENGTH) == own[: size + 1]
    text = _decoded(tokenizer, own[:size])
    assert _compare(reference, tokenizer, text, "stop").tokens == size + 1
    longer = _compare(reference, tokenizer, _decoded(tokenizer, own), "length")
    assert not longer.passed
    assert longer.differences[0].target_token == own[size]


def test_near_ties_of_half_precision_pass(tokenizer: PreTrainedTokenizerFast) -> None:
    class Tied(Reference):
        """A reference in which the likeliest two tokens have nearly equal logits."""

        def greedy_scores(self, prefix: Tokens) -> Tensor:
            scores = super().greedy_scores(prefix).clone()
            first, second = scores.topk(2).indices.tolist()
            scores[second] = scores[first] * (1 - 2.0**-8)
            return scores

    model = tiny_llama(vocab=300).to(torch.bfloat16)
    reference = Tied(model, PROMPT)
    own = reference.greedy(LENGTH)
    for position in range(LENGTH):
        second = int(reference.greedy_scores(own[:position]).topk(2).indices[1])
        text = _decoded(tokenizer, (*own[:position], second))
        before = _decoded(tokenizer, own[:position])
        piece = text[len(before) :]
        is_whole = not before.endswith(REPLACEMENT)
        if is_whole and piece.isascii() and piece and not _decoded(tokenizer, own).startswith(text):
            break
    check = _compare(reference, tokenizer, text)
    assert check.passed
    assert check.differences[0].is_near_tie
    assert "1 near-tie" in str(check)


def test_drafts_are_unknown_if_no_answer_counts_them() -> None:
    silent = ServerAnswer(200, "a", usage=TokenUsage(1, 1, None, None))
    assert drafted_in([silent, ServerAnswer(200, "a")]) is None
    assert drafted_in([silent, ServerAnswer(200, "a", usage=TokenUsage(1, 1, 0, 0))]) == 0
