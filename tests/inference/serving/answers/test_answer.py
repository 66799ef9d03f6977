"""The origin of each token in an answer."""

from typing import Any

import pytest
from helpers.serving import MODEL, Running
from openai import OpenAI

PROMPT = "def main(argument):"
OPTIONS: dict[str, Any] = {
    "model": MODEL,
    "temperature": 0,
    "max_tokens": 40,
    "extra_body": {"jakiro": {"drafts": True}},
}


def _check(text: str, tokens: list[dict[str, Any]], expected: list[int], accepted: int) -> None:
    assert [token["id"] for token in tokens] == expected
    assert sum(token["depth"] > 0 for token in tokens) == accepted
    for token, following in zip(tokens, [*tokens[1:], {"offset": len(text)}], strict=True):
        assert (token["depth"] == 0) is (token["proposer"] == -1)
        own = text[token["offset"] : following["offset"]]
        assert "\N{REPLACEMENT CHARACTER}" in token["text"] or own == token["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_completions_name_the_origin_of_each_token(
    client: OpenAI, server: Running, stream: bool
) -> None:
    alone = server.server.engine.decoder.generate(PROMPT, temperature=0, max_new_tokens=40)
    found: Any = client.completions.create(prompt=PROMPT, stream=stream, **OPTIONS)
    choices = [part.choices[0] for part in (found if stream else [found])]
    tokens = [token for choice in choices for token in choice.jakiro["tokens"]]
    text = "".join(choice.text for choice in choices)
    _check(text, tokens, alone.new_token_ids, alone.stats.accepted.total())
    assert all(choice.logprobs is None for choice in choices)


@pytest.mark.parametrize("stream", [False, True])
def test_chats_name_the_origin_of_each_token(client: OpenAI, stream: bool) -> None:
    messages: Any = [{"role": "user", "content": "Why?"}]
    found: Any = client.chat.completions.create(messages=messages, stream=stream, **OPTIONS)
    parts = [part.choices[0] for part in (found if stream else [found])]
    tokens = [
        token for part in parts for token in (getattr(part, "jakiro", None) or {}).get("tokens", ())
    ]
    deltas = [part.delta if stream else part.message for part in parts]
    text = "".join(delta.content or "" for delta in deltas)
    joined = "".join(token["text"] for token in tokens)
    assert "\N{REPLACEMENT CHARACTER}" in joined or joined == text
    assert len(tokens) > 30


def test_without_the_option_nothing_is_added(client: OpenAI) -> None:
    options = {**OPTIONS, "extra_body": {}}
    found = client.completions.create(prompt=PROMPT, **options)
    assert "jakiro" not in found.choices[0].to_dict()
