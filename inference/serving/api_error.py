"""Errors in the form of OpenAI's interface."""

from typing import Any

from starlette.responses import JSONResponse

from jakiro.errors import EngineStopped, JakiroError, PromptError, ResourceError

_FAILED = "decoding has failed; see the log of the server"


class ApiError(Exception):
    """An error that is sent to the client."""

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
        error: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
        self.body = {"error": error}

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def api_error_of(error: JakiroError) -> ApiError:
    """Return the error that is sent to a client for an error of this package.

    Messages about the prompt, its options, and the memory for it are sent, because the client can
    act on them. Other messages, which may contain the text of any exception, are only logged.

    Args:
        error: the error. An `EngineStopped` with a cause comes from an engine that has died.
    """
    if isinstance(error, PromptError):
        return ApiError(400, str(error))
    if isinstance(error, ResourceError):
        return _of_server(503, str(error), "unavailable")
    if isinstance(error, EngineStopped):
        is_dead = error.__cause__ is not None
        return _of_server(503, _FAILED if is_dead else "the server is shutting down", "unavailable")
    return _of_server(500, _FAILED, "decoding_failed")


def _of_server(status: int, message: str, code: str) -> ApiError:
    return ApiError(status, message, kind="server_error", code=code)
