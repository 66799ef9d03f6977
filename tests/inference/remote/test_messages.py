"""Messages are closed: unknown fields, other types and numbers out of range are refused."""

import json

import pytest

from inference.remote.errors import MessageError
from inference.remote.messages import (
    OpenSession,
    SessionOpened,
    StepHeader,
    TreeLimits,
    parse_message,
)

OPEN = {"prompt": [1, 2], "seed": 5, "max_tokens": 8}


def test_a_message_arrives_as_it_was_sent() -> None:
    sent = OpenSession(prompt="text", seed=5, max_tokens=8, temperature=0.5)
    assert parse_message(sent.model_dump_json(), OpenSession) == sent


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"protocol": 2}, "protocol"),
        ({"unknown": 1}, "unknown"),
        ({"seed": -1}, "seed"),
        ({"seed": "5"}, "seed"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"prompt": [-1]}, "prompt"),
        ({"temperature": 3.0}, "temperature"),
        ({"resume": {"emitted": [], "next_step": 1}}, "resume.emitted"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, object], field: str) -> None:
    with pytest.raises(MessageError, match=field) as found:
        parse_message(json.dumps({**OPEN, **change}), OpenSession)
    assert found.value.code == "malformed_message"


@pytest.mark.parametrize("text", [b"", b"\xff", b"[" * 10_000, b"NaN", b"{}"])
def test_text_that_is_no_message_is_refused(text: bytes) -> None:
    with pytest.raises(MessageError):
        parse_message(text, OpenSession)


def test_a_digest_has_32_hexadecimal_digits() -> None:
    with pytest.raises(MessageError, match="digest"):
        parse_message(b'{"base_length": 1, "root": 2, "digest": "ab"}', StepHeader)


@pytest.mark.parametrize("session", ["a\r\nb", "a/b", "a b", "\ud800", "a" * 65, ""])
def test_the_name_of_a_session_cannot_change_an_address(session: str) -> None:
    answer = {
        "session": "a",
        "fingerprint": "f",
        "samples": False,
        "prompt_token_ids": [1],
        "emitted": [2],
        "text": "b",
        "finished": False,
        "next_step": 1,
        "limits": TreeLimits().model_dump(),
    }
    assert parse_message(json.dumps(answer), SessionOpened).session == "a"
    with pytest.raises(MessageError):
        parse_message(json.dumps({**answer, "session": session}), SessionOpened)
