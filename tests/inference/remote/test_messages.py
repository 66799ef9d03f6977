"""Messages are closed, and foreign bytes never raise anything but a `MessageError`."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.remote.messages import (
    MessageError,
    OpenSession,
    Progress,
    TensorSpec,
    decode_frame,
    encode_frame,
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


SPECS = {"a": TensorSpec(np.int32, 1), "b": TensorSpec(np.uint16, 2)}
MESSAGE = Progress(emitted=[4, 5], next_step=2)
TENSORS = {"a": np.arange(3, dtype=np.int32), "b": np.ones((2, 2), np.uint16)}
BODY = encode_frame(MESSAGE, TENSORS)


def test_a_frame_arrives_as_it_was_sent() -> None:
    message, tensors = decode_frame(BODY, Progress, SPECS)
    assert message == MESSAGE
    assert {name: own.tolist() for name, own in tensors.items()} == {
        "a": [0, 1, 2],
        "b": [[1, 1], [1, 1]],
    }


def test_wide_rows_arrive_although_there_are_none() -> None:
    specs = {"rows": TensorSpec(np.uint8, 2)}
    frame = encode_frame(MESSAGE, {"rows": np.empty((0, 9216), np.uint8)})
    _, tensors = decode_frame(frame, Progress, specs)
    assert tensors["rows"].shape == (0, 9216)


def test_tensors_that_are_not_contiguous_arrive_as_they_are() -> None:
    wide = np.arange(8, dtype=np.uint16).reshape(2, 4)[:, ::2]
    _, tensors = decode_frame(encode_frame(MESSAGE, {**TENSORS, "b": wide}), Progress, SPECS)
    assert tensors["b"].tolist() == [[0, 2], [4, 6]]


@pytest.mark.parametrize("specs", [{"a": SPECS["a"]}, {**SPECS, "b": TensorSpec(np.int32, 2)}])
def test_other_tensors_are_refused(specs: dict[str, TensorSpec]) -> None:
    with pytest.raises(MessageError) as found:
        decode_frame(BODY, Progress, specs)
    assert found.value.code == "malformed_frame"


def test_a_wrong_message_in_a_right_frame_is_refused() -> None:
    wrong = Progress.model_construct(emitted=[], next_step=0)
    with pytest.raises(MessageError) as found:
        decode_frame(encode_frame(wrong, TENSORS), Progress, SPECS)
    assert found.value.code == "malformed_message"


@settings(max_examples=200)
@given(body=st.binary(max_size=300))
def test_any_bytes_are_refused_by_name(body: bytes) -> None:
    with pytest.raises(MessageError):
        decode_frame(body, Progress, SPECS)
