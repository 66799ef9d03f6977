"""Request bodies: prompts of each kind, and the field that an error names."""

import json
from typing import Any

import pytest

from inference.serving.api_error import ApiError
from inference.serving.parsing import parse_body
from inference.serving.schema import ChatBody, CompletionBody


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
        (None, "prompt", "valid string"),
        ([], "prompt", "at least 1"),
        ([[]], "prompt.0", "at least 1"),
        ([1, "a"], "prompt.1", "valid integer"),
        (["a", 1], "prompt.1", "valid string"),
        ([1.5], "prompt.0", "valid integer"),
        ([[1], "a"], "prompt.1", "valid array"),
        (["a"] * 17, "prompt", "at most 16"),
        ([{}], "prompt.0", "valid integer"),
    ],
)
def test_the_wrong_part_of_a_prompt_is_named(prompt: Any, param: str, reason: str) -> None:
    error = _error(CompletionBody, prompt=prompt)
    assert error["param"] == param
    assert reason in error["message"]


def test_the_wrong_part_of_a_chat_is_named() -> None:
    good = {"role": "user", "content": "a"}
    for messages, param in (
        ([good, {"role": "tool", "content": "a"}], "messages.1.role"),
        ([good, {"role": "user"}], "messages.1.content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content.0.type"),
        ([], "messages"),
    ):
        assert _error(ChatBody, messages=messages)["param"] == param


def test_very_many_errors_are_not_listed() -> None:
    error = _error(CompletionBody, prompt="a", **{f"k{number}": 1 for number in range(2000)})
    assert "got: 2000 errors" in error["message"]


def test_parts_of_a_large_body_are_not_shown() -> None:
    error = _error(CompletionBody, prompt=["a"] * 50_000)
    assert "got: something else" in error["message"]


def test_biases_are_numbers_of_tokens() -> None:
    body = b'{"model": "m", "prompt": "a", "logit_bias": {"5": 1, "06": -2.5}}'
    assert parse_body(CompletionBody, body).biases == {5: 1.0, 6: -2.5}
