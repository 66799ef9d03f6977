"""Request bodies: prompts of each kind, and the field that an error names."""

import json
from typing import Any

import pytest

from inference.serving.api_error import ApiError
from inference.serving.schema import ChatBody, CompletionBody, parse_body


def _error(kind: Any, **fields: Any) -> dict[str, Any]:
    with pytest.raises(ApiError) as info:
        parse_body(kind, json.dumps({"model": "m", **fields}).encode())
    assert info.value.status == 400
    error: dict[str, Any] = info.value.body["error"]
    return error


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        ([1, 2], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_a_prompt_is_a_text_or_ids_or_a_list_of_them(prompt: Any, expected: list[Any]) -> None:
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    assert parse_body(CompletionBody, body).prompts == expected


GOOD = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"prompt": 1}, "prompt", "valid string"),
        ({"prompt": []}, "prompt", "at least 1"),
        ({"prompt": ["a", 1]}, "prompt", "valid string"),
        ({"prompt": ["a"] * 17}, "prompt", "at most 16"),
        ({"tools": [{}]}, "tools", "not supported"),
        ({"echo": True}, "echo", "False"),
        ({"presence_penalty": 2.5}, "presence_penalty", "less than or equal to 2"),
        ({"logit_bias": {"five": 1}}, "logit_bias.five", "pattern"),
        ({"logit_bias": {str(n): 0 for n in range(301)}}, "logit_bias", "at most 300"),
        ({"temperature": True}, "temperature", "number"),
        ({"temperature": 9e-7}, "temperature", "at least 1e-06"),
        ({"repetition_penalty": 9e-7}, "repetition_penalty", "greater"),
        ({"jakiro": {"top_k": 3}}, "jakiro.top_k", "not supported"),
        ({"stop": ["x"] * 10**5}, "stop", "at most 4"),
        ({"stream_options": {"include_usage": True}}, None, "requires stream"),
        ({"messages": [GOOD, {"role": "function", "content": "a"}]}, "messages.1.role", "Input"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None, ""),
        ({"messages": [{**GOOD, "tool_calls": [{"id": "1"}]}]}, "messages.0.tool_calls.0", ""),
        ({"messages": [{"role": "tool"}]}, "messages.0", "needs content"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str | None, reason: str) -> None:
    kind = ChatBody if "messages" in fields else CompletionBody
    error = _error(kind, **({"prompt": "a"} if kind is CompletionBody else {}) | fields)
    assert (error["param"] or "").startswith(param or "")
    assert error["type"] == "invalid_request_error"
    assert reason in error["message"]
    assert len(error["message"]) < 300


def test_the_smallest_temperatures_are_accepted() -> None:
    for good in (0, 1e-6):
        body = json.dumps({"model": "m", "prompt": "a", "temperature": good}).encode()
        assert parse_body(CompletionBody, body).temperature == good


def test_null_and_empty_lists_ask_for_nothing() -> None:
    message = {"role": "user", "content": "a", "reasoning_content": None, "tool_calls": []}
    unknown = {"tools": [], "tool_choice": None, "functions": None, "reasoning_effort": None}
    body = json.dumps({"model": "m", "messages": [message], **unknown}).encode()
    assert parse_body(ChatBody, body).messages[0].for_template == {"role": "user", "content": "a"}
    parse_body(CompletionBody, b'{"model": "m", "prompt": "a", "suffix": null}')
    assert _error(ChatBody, messages=[message], tools=[{}])["param"] == "tools.0.type"


def test_biases_are_numbers_of_tokens() -> None:
    body = b'{"model": "m", "prompt": "a", "logit_bias": {"5": 1, "06": -2.5}}'
    assert parse_body(CompletionBody, body).options.logit_bias == {5: 1.0, 6: -2.5}
