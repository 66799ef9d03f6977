"""Prompts at the beginning of texts, with their log-probabilities."""

from typing import Any

import pytest
import torch
from helpers.models import tiny_llama
from helpers.serving import MODEL, Running, deltas, running
from helpers.tokenizers import tiny_tokenizer
from openai import BadRequestError, OpenAI

from inference import SpeculativeDecoder
from inference.engine.context import PREFILL_CHUNK
from inference.serving.answers.echo import echo_of

PROMPT = "def näive(漢字 😀):\n    return"
OPTIONS: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def decoder(server: Running) -> SpeculativeDecoder:
    return server.server.engine.decoder


def _expected(decoder: SpeculativeDecoder, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return decoder.target.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)


def test_a_text_begins_with_its_prompt(client: OpenAI, decoder: SpeculativeDecoder) -> None:
    ids = list(decoder.tokenizer(PROMPT)["input_ids"])
    after = client.completions.create(prompt=PROMPT, **OPTIONS).choices[0].text
    for prompt in (PROMPT, ids):
        found = client.completions.create(prompt=prompt, echo=True, **OPTIONS)
        assert found.choices[0].text == PROMPT + after
        assert found.choices[0].logprobs is None
        stream = client.completions.create(prompt=prompt, echo=True, stream=True, **OPTIONS)
        assert deltas(list(stream)) == PROMPT + after
    both = client.completions.create(prompt=[PROMPT, "a b"], echo=True, n=2, **OPTIONS)
    assert [own.text.startswith(PROMPT) for own in both.choices] == [True, True, False, False]
    assert all(own.text.startswith("a b") for own in both.choices[2:])


@pytest.mark.parametrize("stream", [False, True])
def test_log_probs_of_the_prompt_are_those_of_the_target(
    client: OpenAI, decoder: SpeculativeDecoder, stream: bool
) -> None:
    ids = list(decoder.tokenizer(PROMPT)["input_ids"])
    text, tokens, log_probs, top, offsets = "", [], [], [], []
    found: Any = client.completions.create(
        prompt=PROMPT, echo=True, logprobs=3, stream=stream, **OPTIONS
    )
    for part in found if stream else [found]:
        own = part.choices[0].logprobs
        text += part.choices[0].text
        tokens += own.tokens
        log_probs += own.token_logprobs
        top += own.top_logprobs
        offsets += own.text_offset
    new = decoder.generate(PROMPT, temperature=0, max_new_tokens=12).new_token_ids
    rows = _expected(decoder, [*ids, *new])
    assert tokens == [decoder.tokenizer.decode([token]) for token in [*ids, *new]]
    assert (log_probs[0], top[0]) == (None, None)
    for number, token in enumerate([*ids, *new][1:], 1):
        assert log_probs[number] == pytest.approx(float(rows[number - 1, token]), abs=1e-4)
        best = max(top[number].values())
        assert best == pytest.approx(float(rows[number - 1].max()), abs=1e-4)
    for offset, token in zip(offsets, tokens, strict=True):
        assert "\N{REPLACEMENT CHARACTER}" in token or text[offset:].startswith(token)


def test_a_prompt_of_several_chunks() -> None:
    tokenizer = tiny_tokenizer()
    length = PREFILL_CHUNK + 70
    model = tiny_llama(vocab=len(tokenizer), max_position_embeddings=2 * length)
    decoder = SpeculativeDecoder(model, None, tokenizer, tree="fixed")
    ids = torch.randint(5, len(tokenizer), (length,), generator=torch.Generator().manual_seed(0))
    with running(decoder, capacity=length + 20, places=2) as server, server.client() as client:
        found = client.completions.create(prompt=ids.tolist(), echo=True, logprobs=0, **OPTIONS)
        own = found.choices[0].logprobs
    assert own is not None
    assert own.token_logprobs is not None
    rows = _expected(decoder, ids.tolist())
    expected = rows[:-1].gather(1, ids[1:, None])[:, 0].tolist()
    assert own.token_logprobs[1:length] == pytest.approx(expected, abs=1e-4)


def test_a_prompt_with_special_tokens_is_echoed_as_it_is(decoder: SpeculativeDecoder) -> None:
    tokenizer = decoder.tokenizer
    assert tokenizer is not None
    special = str(tokenizer.eos_token)
    prompt = f"a {special} b"
    ids = list(tokenizer(prompt)["input_ids"])
    echo = echo_of(prompt, ids, tokenizer)
    assert echo.text == prompt
    assert len(echo.offsets) == len(ids)
    # A token that the tokenizer adds has no text of its own.
    begun = echo_of(prompt, [int(tokenizer.eos_token_id), *ids], tokenizer)
    assert begun.text == prompt
    assert begun.offsets[:2] == [0, 0]
    assert echo_of(ids, ids, tokenizer).text == tokenizer.decode(ids, skip_special_tokens=True)


def test_chats_have_no_echo(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="echo is not supported"):
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "a"}], extra_body={"echo": True}
        )


def test_an_option_of_other_servers_is_sent_in_an_object_of_its_own(client: OpenAI) -> None:
    ask = client.chat.completions.create
    chat: Any = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    with pytest.raises(BadRequestError, match=r"top_k is not supported.*in the object jakiro"):
        ask(**chat, extra_body={"top_k": 5})
    assert ask(**chat, extra_body={"jakiro": {"top_k": 5}}).usage
