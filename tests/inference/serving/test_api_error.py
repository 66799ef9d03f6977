"""Errors of the engine in the form of OpenAI's interface."""

import pytest

from inference.serving.api_error import ApiError, api_error_of
from jakiro.errors import EngineStopped, JakiroError, NumericalError, PromptError, ResourceError

_FAILED = "decoding has failed; see the log of the server"


def _dead() -> EngineStopped:
    error = EngineStopped("stopped")
    error.__cause__ = RuntimeError("the device is lost")
    return error


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "message"),
    [
        (
            PromptError("wrong", expected=1, got=2),
            400,
            "invalid_request_error",
            None,
            "wrong; expected: 1; got: 2",
        ),
        (
            EngineStopped("stopped"),
            503,
            "server_error",
            "unavailable",
            "the server is shutting down",
        ),
        (_dead(), 503, "server_error", "unavailable", _FAILED),
        (
            ResourceError("no memory", got="a prompt of 9 tokens"),
            503,
            "server_error",
            "unavailable",
            "no memory; got: a prompt of 9 tokens",
        ),
        (NumericalError("NaN"), 500, "server_error", "decoding_failed", _FAILED),
    ],
    ids=str,
)
def test_the_status_says_whose_error_it_is(
    error: JakiroError, status: int, kind: str, code: str | None, message: str
) -> None:
    found = api_error_of(error)
    assert found.status == status
    expected = {"message": message, "type": kind, "param": None, "code": code}
    assert found.body == {"error": expected}
    assert found.headers == {}


def test_an_error_may_name_the_time_to_wait() -> None:
    assert ApiError(429, "later", retry_after=3).headers == {"retry-after": "3"}
