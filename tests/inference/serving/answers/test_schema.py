"""Request bodies: prompts of each kind, and the field that an error names."""

import gc
import json
from time import thread_time
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


def test_very_many_errors_are_not_listed() -> None:
    error = _error(CompletionBody, prompt="a", **{f"k{number}": 1 for number in range(2000)})
    assert "got: 2000 errors" in error["message"]


def test_parts_of_a_large_body_are_not_shown() -> None:
    error = _error(CompletionBody, prompt=["a"] * 50_000)
    assert "got: something else" in error["message"]


def test_biases_are_numbers_of_tokens() -> None:
    body = b'{"model": "m", "prompt": "a", "logit_bias": {"5": 1, "06": -2.5}}'
    assert parse_body(CompletionBody, body).biases == {5: 1.0, 6: -2.5}


def _many(part: str, count: int) -> str:
    return ",".join([part] * count)


@pytest.mark.parametrize(
    "fields",
    [
        '"prompt":[' + _many("1.5", 250_000) + "]",
        '"prompt":[' + _many('"a"', 250_000) + "]",
        '"prompt":[' + _many("[1]", 250_000) + "]",
        '"prompt":[' + _many("{}", 250_000) + "]",
        '"prompt":"a","stop":[' + _many('"x"', 250_000) + "]",
        '"prompt":"a","logit_bias":{' + ",".join(f'"{n}":"x"' for n in range(80_000)) + "}",
        '"prompt":"a",' + ",".join(f'"k{n}":1' for n in range(80_000)),
        '"messages":[' + _many('{"role":"user","content":[' + _many("{}", 300) + "]}", 1000) + "]",
    ],
    ids=lambda text: text[:30],
)
def test_large_wrong_bodies_do_not_hold_up_other_requests(fields: str) -> None:
    """The event loop parses bodies, so the time of its thread counts."""
    kind = ChatBody if "messages" in fields else CompletionBody
    content = f'{{"model":"m",{fields}}}'.encode()
    gc.freeze()  # as the process of a server does
    started = thread_time()
    with pytest.raises(ApiError):
        parse_body(kind, content)
    seconds = thread_time() - started
    gc.unfreeze()
    assert seconds < 0.5
