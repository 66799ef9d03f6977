"""Messages are closed: unknown fields, other types and numbers out of range are refused."""

import json

import pytest

from inference.remote.messages import (
    MessageError,
    OpenSession,
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
