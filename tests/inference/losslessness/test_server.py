"""A lossless server passes, planted faults are found, and ends and near-ties are recognized."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.models import tiny_llama
from helpers.serving import Running, running, tiny_decoder
from helpers.tokenizers import tiny_tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from inference.client import ServerAnswer, ServerClient
from inference.generation.incremental_text import IncrementalText
from inference.losslessness.records import Check, VerifySettings
from inference.losslessness.reference import Reference, Tokens
from inference.losslessness.server import compare_text, verify_server
from jakiro.utils.token_text import REPLACEMENT

PROMPTS: list[Any] = ["def main(", "print(", [{"role": "user", "content": "Why?"}]]
LENGTH = 12
PROMPT = [70, 71]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(tiny_decoder(trained=True)) as server:
        yield server


def _check(server: Running, max_new_tokens: int) -> Check:
    client = ServerClient(server.url)
    client.connect()
    decoder = server.server.engine.decoder
    model: Any = decoder.target.model
    assert decoder.tokenizer is not None
    settings = VerifySettings(max_new_tokens=max_new_tokens)
    try:
        return verify_server(client, model, decoder.tokenizer, PROMPTS, settings)
    finally:
        client.close()


def test_a_lossless_server_passes(server: Running) -> None:
    check = _check(server, 16)
    assert check.passed
    assert (check.prompts, check.tokens, check.differences) == (3, 48, ())
    assert "length" not in check.line


def test_another_text_is_a_difference(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    correct = IncrementalText.push

    def planted(text: IncrementalText, token_id: int) -> str:
        return correct(text, token_id).replace("a", "q").replace("e", "q")

    monkeypatch.setattr(IncrementalText, "push", planted)
    assert not _check(server, 60).passed


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(tiny_llama(vocab=300), PROMPT)


def _compare(
    reference: Reference, tokenizer: PreTrainedTokenizerFast, text: str, reason: str = "length"
) -> tuple[int, Any]:
    answer = ServerAnswer(text, finish_reason=reason)
    return compare_text(reference, tokenizer, answer, LENGTH, 1)


def _decoded(tokenizer: PreTrainedTokenizerFast, tokens: Tokens) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))


def test_the_first_difference_is_found(
    reference: Reference, tokenizer: PreTrainedTokenizerFast
) -> None:
    own = reference.greedy(LENGTH)
    assert _compare(reference, tokenizer, _decoded(tokenizer, own)) == (LENGTH, None)
    letters = tokenizer.convert_tokens_to_ids(["q", "z"])
    other = next(token for token in letters if token != own[4])
    text = _decoded(tokenizer, (*own[:4], other, *own[5:]))
    equal, difference = _compare(reference, tokenizer, text)
    assert (equal, difference.prompt, difference.position) == (4, 1, 5)
    assert (difference.target_token, difference.decoder_token) == (own[4], other)
    assert difference.gap is not None
    assert difference.gap > 0 == difference.rounding
    assert not difference.is_near_tie
    assert difference.server_text.startswith(tokenizer.decode([other]))


def test_the_end_of_a_text_must_be_the_targets_own(tokenizer: PreTrainedTokenizerFast) -> None:
    endless = Reference(tiny_llama(vocab=300), PROMPT)
    own = endless.greedy(LENGTH)
    size = next(n for n in range(3, LENGTH) if own[n] not in own[:n])
    reference = Reference(tiny_llama(vocab=300, eos_token_id=own[size]), PROMPT)
    assert reference.greedy(LENGTH) == own[: size + 1]
    text = _decoded(tokenizer, own[:size])
    assert _compare(reference, tokenizer, text, "stop") == (size + 1, None)
    assert _compare(endless, tokenizer, text, "stop")[1] is not None
    _, difference = _compare(reference, tokenizer, _decoded(tokenizer, own))
    assert difference.target_token == own[size]


def test_near_ties_of_half_precision_pass(tokenizer: PreTrainedTokenizerFast) -> None:
    class Tied(Reference):
        """A reference in which the likeliest two tokens have nearly equal logits."""

        def greedy_scores(self, prefix: Tokens) -> Tensor:
            scores = super().greedy_scores(prefix).clone()
            first, second = scores.topk(2).indices.tolist()
            scores[second] = scores[first] * (1 - 2.0**-8)
            return scores

    reference = Tied(tiny_llama(vocab=300).to(torch.bfloat16), PROMPT)
    own = reference.greedy(LENGTH)
    for position in range(LENGTH):
        second = int(reference.greedy_scores(own[:position]).topk(2).indices[1])
        text = _decoded(tokenizer, (*own[:position], second))
        before = _decoded(tokenizer, own[:position])
        piece = text[len(before) :]
        is_whole = not before.endswith(REPLACEMENT)
        if is_whole and piece.isascii() and piece and not _decoded(tokenizer, own).startswith(text):
            break
    assert _compare(reference, tokenizer, text)[1].is_near_tie
