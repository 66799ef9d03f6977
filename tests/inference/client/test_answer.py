"""Answers are put together from whatever a server sends, and say what is wrong with it."""

import json
from typing import Any

import pytest
from helpers.false_server import completion

from inference.client.answer import AnswerReader, TokenUsage


def _read(*parts: Any) -> AnswerReader:
    reader = AnswerReader()
    for part in parts:
        reader.add(json.dumps(part))
    return reader


def test_a_stream_of_a_completion_gives_its_text_times_and_usage() -> None:
    details = {"accepted_prediction_tokens": 1, "rejected_prediction_tokens": 4}
    counts = {"prompt_tokens": 2, "completion_tokens": 3, "completion_tokens_details": details}
    answer = _read(
        completion("a", None, system_fingerprint="fp_1"),
        completion("", None),
        completion("bc", "length"),
        {"choices": [], "usage": counts},
    ).end()
    assert (answer.text, answer.finish_reason, answer.error) == ("abc", "length", None)
    assert answer.is_complete
    assert answer.usage == TokenUsage(2, 3, 1, 4)
    assert answer.num_tokens == 3
    assert answer.system_fingerprint == "fp_1"
    first, second = answer.arrivals
    assert 0 <= first <= second <= answer.seconds


def test_a_chat_gives_its_text_and_tokens_streamed_or_not() -> None:
    names = {"content": [{"token": "Hi", "logprob": -1.0, "bytes": None}]}
    delta = {"delta": {"content": "Hi"}, "logprobs": names, "finish_reason": None}
    end = {"delta": {}, "logprobs": None, "finish_reason": "stop"}
    streamed = _read(
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [delta]},
        {"choices": [end], "usage": None},
    ).end()
    message = {"message": {"content": "Hi"}, "logprobs": names, "finish_reason": "stop"}
    whole = _read({"choices": [message]}).end()
    for answer in (streamed, whole):
        assert (answer.text, answer.tokens, answer.finish_reason) == ("Hi", ["Hi"], "stop")
        assert answer.usage is None
        assert answer.num_tokens == len(answer.arrivals) == 1


@pytest.mark.parametrize(
    ("part", "error"),
    [
        ({"error": {"message": "the engine has stopped"}}, "the engine has stopped"),
        ({"error": "no memory"}, "no memory"),
        ({"choices": "none"}, "cannot be read"),
        ([], "cannot be read"),
        ({"choices": None}, "without a finish_reason"),
    ],
)
def test_a_part_that_is_wrong_is_the_error_of_the_answer(part: Any, error: str) -> None:
    answer = _read(completion("a", None), part).end()
    assert answer.error is not None
    assert error in answer.error
    assert not answer.is_complete


def test_a_cut_answer_has_no_error() -> None:
    reader = _read(completion("a", None))
    reader.answer.is_cut = True
    answer = reader.end()
    assert answer.error is None
    assert not answer.is_complete


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"error": {"message": "too long"}}', "too long"),
        (b'{"detail": "Not Found"}', '{"detail": "Not Found"}'),
        (b"\xff", "\N{REPLACEMENT CHARACTER}"),
        (b"", "status 500 without a message"),
    ],
)
def test_the_message_of_a_refusal_is_kept(content: bytes, message: str) -> None:
    reader = AnswerReader()
    reader.answer.status = 500
    reader.refuse(content)
    assert reader.end().error == message
