"""Errors of the engine in the form of OpenAI's interface."""

import pytest

from inference.serving.api_error import ApiError, api_error_of
from jakiro.errors import EngineStopped, JakiroError, NumericalError, PromptError, ResourceError


def _dead() -> EngineStopped:
    error = EngineStopped("stopped")
    error.__cause__ = RuntimeError("the device is lost")
    return error


@pytest.mark.parametrize(
    ("error", "status", "code", "message"),
    [
        (PromptError("wrong", expected=1), 400, None, "wrong; expected: 1"),
        (EngineStopped("stopped"), 503, "unavailable", "the server is shutting down"),
        (_dead(), 503, "unavailable", "decoding has failed; see the log of the server"),
        (ResourceError("no memory"), 503, "unavailable", "no memory"),
        (NumericalError("NaN"), 500, "decoding_failed", "decoding has failed; see the log"),
    ],
    ids=str,
)
def test_the_status_says_whose_error_it_is(
    error: JakiroError, status: int, code: str | None, message: str
) -> None:
    found = api_error_of(error)
    assert found.status == status
    kind = "server_error" if code else "invalid_request_error"
    sent = found.body["error"]
    assert (sent["type"], sent["param"], sent["code"]) == (kind, None, code)
    assert sent["message"].startswith(message)


def test_an_error_may_name_the_time_to_wait() -> None:
    assert ApiError(429, "later", retry_after=3).response.headers["retry-after"] == "3"
