"""Errors in the form of OpenAI's interface."""

from jakiro.errors import EngineStopped, JakiroError, PromptError, ResourceError


class ApiError(Exception):
    """An error that is sent to the client.

    Args:
        status: HTTP status code.
        message: description of the problem, with the expected value, the value found, and the
            remedy.
        kind: kind of the error, OpenAI's `type`.
        param: field of the request that is wrong; None if there is none.
        code: short name of the error; None if there is none.
        retry_after: seconds after which the client may try again; None to leave this open.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {} if retry_after is None else {"retry-after": str(retry_after)}
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def api_error_of(error: JakiroError) -> ApiError:
    """Return the error that tells a client about one of ours."""
    if isinstance(error, PromptError):
        return ApiError(400, str(error))
    if isinstance(error, EngineStopped | ResourceError):
        return ApiError(503, str(error), kind="server_error", code="unavailable")
    return ApiError(500, str(error), kind="server_error", code="decoding_failed")
