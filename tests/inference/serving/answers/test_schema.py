"""Request bodies: prompts of each kind, and the field that an error names."""

import json
from typing import Any

import pytest

from inference.serving.answers.schema import ChatBody, CompletionBody, parse_body
from inference.serving.api_error import ApiError


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


@pytest.mark.parametrize(
    ("prompt", "param", "reason"),
    [
        (1, "prompt", "valid string"),
        ([], "prompt", "at least 1"),
        ([[]], "prompt.0", "at least 1"),
        (["a", 1], "prompt", "valid string"),
        (["a"] * 17, "prompt", "at most 16"),
    ],
)
def test_the_wrong_part_of_a_prompt_is_named(prompt: Any, param: str, reason: str) -> None:
    error = _error(CompletionBody, prompt=prompt)
    assert error["param"] == param
    assert reason in error["message"]


@pytest.mark.parametrize("value", [1e-38, 5e-324, 9e-7])
def test_divisors_of_logits_that_are_too_small_are_refused(value: float) -> None:
    assert _error(CompletionBody, prompt="a", temperature=value)["param"] == "temperature"
    error = _error(CompletionBody, prompt="a", jakiro={"repetition_penalty": value})
    assert error["param"] == "jakiro.repetition_penalty"
    for good in (0, 1e-6):
        body = json.dumps({"model": "m", "prompt": "a", "temperature": good}).encode()
        assert parse_body(CompletionBody, body).temperature == good


def test_the_wrong_part_of_a_chat_is_named() -> None:
    good = {"role": "user", "content": "a"}
    for messages, param in (
        ([good, {"role": "tool", "content": "a"}], "messages.1.role"),
        ([good, {"role": "user"}], "messages.1.content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content.0.type"),
        ([], "messages"),
    ):
        assert _error(ChatBody, messages=messages)["param"] == param


def test_null_and_empty_lists_ask_for_nothing() -> None:
    message = {"role": "user", "content": "a", "reasoning_content": None, "tool_calls": []}
    unknown = {"tools": [], "tool_choice": None, "functions": None, "reasoning_effort": None}
    body = json.dumps({"model": "m", "messages": [message], **unknown}).encode()
    assert parse_body(ChatBody, body).messages[0].for_template == {"role": "user", "content": "a"}
    parse_body(CompletionBody, b'{"model": "m", "prompt": "a", "suffix": null}')
    assert _error(ChatBody, messages=[message], tools=[{}])["param"] == "tools"


def test_biases_are_numbers_of_tokens() -> None:
    body = b'{"model": "m", "prompt": "a", "logit_bias": {"5": 1, "06": -2.5}}'
    assert parse_body(CompletionBody, body).options.logit_bias == {5: 1.0, 6: -2.5}
