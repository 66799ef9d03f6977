"""Errors of the engine in the form of OpenAI's interface."""

import pytest

from inference.serving.api_error import ApiError, api_error_of
from jakiro.errors import EngineStopped, JakiroError, NumericalError, PromptError, ResourceError


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (PromptError("wrong", expected=1, got=2), 400, "invalid_request_error", None),
        (EngineStopped("stopped"), 503, "server_error", "unavailable"),
        (ResourceError("no memory"), 503, "server_error", "unavailable"),
        (NumericalError("NaN"), 500, "server_error", "decoding_failed"),
    ],
    ids=str,
)
def test_the_status_says_whose_error_it_is(
    error: JakiroError, status: int, kind: str, code: str | None
) -> None:
    found = api_error_of(error)
    assert found.status == status
    expected = {"message": str(error), "type": kind, "param": None, "code": code}
    assert found.body == {"error": expected}
    assert found.headers == {}


def test_an_error_may_name_the_time_to_wait() -> None:
    assert ApiError(429, "later", retry_after=3).headers == {"retry-after": "3"}
