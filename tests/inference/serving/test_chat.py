"""`/v1/chat/completions` with OpenAI's own client, over a socket."""

from typing import Any

import pytest
from helpers.serving import MODEL, Running, running, tiny_decoder
from openai import BadRequestError, OpenAI

MESSAGES: Any = [
    {"role": "developer", "content": "Be short."},
    {"role": "user", "content": [{"type": "text", "text": "Why "}, {"type": "text", "text": "?"}]},
]
AS_TEMPLATE = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Why ?"}]
OPTIONS: dict[str, Any] = {"temperature": 0.9, "seed": 5, "max_completion_tokens": 12}


def test_the_answer_is_that_of_the_decoder(client: OpenAI, server: Running) -> None:
    decoder = server.server.engine.decoder
    ids = decoder.tokenizer.apply_chat_template(
        AS_TEMPLATE, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    expected = decoder.generate(list(ids), temperature=0.9, seed=5, max_new_tokens=12).text
    found = client.chat.completions.create(model=MODEL, messages=MESSAGES, **OPTIONS)
    assert found.choices[0].message.content == expected
    assert found.choices[0].message.role == "assistant"
    assert found.usage is not None
    assert found.usage.prompt_tokens == len(ids)
    assert found.object == "chat.completion"


def test_an_answer_can_be_part_of_the_next_question(client: OpenAI) -> None:
    first = client.chat.completions.create(model=MODEL, messages=MESSAGES, **OPTIONS)
    message: Any = first.choices[0].message
    question = {"role": "user", "content": "And then?", "name": "alice"}
    retyped = {"role": "assistant", "content": message.content}
    found, expected = (
        client.chat.completions.create(
            model=MODEL, messages=[*MESSAGES, answer, question], **OPTIONS
        )
        for answer in (message.model_dump(), retyped)
    )
    assert found.choices[0].message.content == expected.choices[0].message.content
    assert found.usage == expected.usage


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, n=2, **OPTIONS)
    chunks = list(
        client.chat.completions.create(model=MODEL, messages=MESSAGES, n=2, stream=True, **OPTIONS)
    )
    for index, choice in enumerate(whole.choices):
        own = [one for chunk in chunks for one in chunk.choices if one.index == index]
        assert own[0].delta.role == "assistant"
        assert "".join(one.delta.content or "" for one in own) == choice.message.content
        assert [one.finish_reason for one in own if one.finish_reason] == ["length"]
        assert own[-1].delta.content is None
    assert len({chunk.id for chunk in chunks}) == 1


def test_without_a_limit_the_answer_fills_the_place(client: OpenAI, server: Running) -> None:
    messages: Any = [{"role": "user", "content": "7 " * 90}]
    found = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    assert found.usage is not None
    is_full = found.usage.total_tokens == server.server.engine.capacity
    assert is_full or found.choices[0].finish_reason == "stop"


def test_log_probs_have_bytes(client: OpenAI) -> None:
    found = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2, **OPTIONS
    )
    log_probs = found.choices[0].logprobs
    assert log_probs is not None
    assert log_probs.content is not None
    joined = b"".join(bytes(token.bytes or ()) for token in log_probs.content)
    assert joined.decode(errors="replace") == found.choices[0].message.content
    for token in log_probs.content:
        assert token.bytes is None or bytes(token.bytes).decode(errors="replace") == token.token
        assert len(token.top_logprobs) == 2
        assert token.logprob <= token.top_logprobs[0].logprob + 1e-9


def test_a_target_without_a_template_answers_only_completions() -> None:
    with running(tiny_decoder(template=None)) as server, server.client() as client:
        with pytest.raises(BadRequestError, match=r"no chat template.*remedy"):
            client.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert client.completions.create(model=MODEL, prompt="a", max_tokens=2).choices
