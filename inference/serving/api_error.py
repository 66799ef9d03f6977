"""Errors in the form of OpenAI's interface."""

from typing import Any

from starlette.responses import JSONResponse

from inference.remote.messages import MessageError
from jakiro.errors import EngineStopped, JakiroError, PromptError, ResourceError
from jakiro.utils.logs import get_logger

_logger = get_logger(__name__)

_FAILED = "decoding has failed; see the log of the server"


class ApiError(Exception):
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
    """Log an error of this package, and return the one that is sent to a client.

    Messages about the prompt, its options, and the memory for it are sent, because the client can
    act on them. Other messages, which may contain the text of any exception, are only logged.
    """
    if isinstance(error, MessageError):
        return ApiError(error.status, str(error), code=error.code)
    if isinstance(error, PromptError):
        return ApiError(400, str(error))
    if isinstance(error, EngineStopped):  # with a cause if the engine has died, which it logs
        is_dead = error.__cause__ is not None
        return _of_server(503, _FAILED if is_dead else "the server is shutting down", "unavailable")
    _logger.error("a request has failed: %s", error, exc_info=error)
    if isinstance(error, ResourceError):
        return _of_server(503, str(error), "unavailable")
    return _of_server(500, _FAILED, "decoding_failed")


def _of_server(status: int, message: str, code: str) -> ApiError:
    return ApiError(status, message, kind="server_error", code=code)
