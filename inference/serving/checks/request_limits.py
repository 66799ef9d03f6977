"""Limits of the size of requests, and of the time in which their bodies must arrive."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference.serving.api_error import ApiError
from inference.serving.checks.access import header_of, refuse


class HeadLimit:
    """Refuses requests whose headers are too large.

    Args:
        app: application behind the limit.
        max_bytes: largest size of the path and of all headers in bytes.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it.

        Args:
            scope: request.
            receive: function that returns the client's messages.
            send: function that sends a message to the client.
        """
        fields = sum(len(name) + len(value) for name, value in scope["headers"])
        size = fields + len(scope["raw_path"]) + len(scope["query_string"])
        if size <= self._max_bytes:
            await self._app(scope, receive, send)
            return
        error = ApiError(
            431,
            f"the headers are too large; expected: at most {self._max_bytes} bytes; "
            f"got: {size}; remedy: send fewer or shorter headers",
            code="headers_too_large",
        )
        await refuse(_closing(error), scope, receive, send)


class BodyLimit:
    """Refuses bodies that are too large or arrive too slowly, without reading the rest of them.

    Args:
        app: application behind the limit.
        max_bytes: largest size of a body in bytes.
        seconds: seconds in which a body must arrive.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it.

        Args:
            scope: request.
            receive: function that returns the client's messages.
            send: function that sends a message to the client.
        """
        declared = header_of(scope, b"content-length")
        if declared.isdigit() and int(declared) > self._max_bytes:
            await refuse(self._too_large(), scope, receive, send)
            return
        await self._app(scope, self._limited(receive), send)

    def _limited(self, receive: Receive) -> Receive:
        """Return a function that raises an error if the body breaks a limit."""
        deadline = asyncio.get_running_loop().time() + self._seconds
        size, is_complete = 0, False

        async def limited() -> Message:
            nonlocal size, is_complete
            if is_complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError as error:
                raise self._too_slow() from error
            size += len(message.get("body", b""))
            is_complete = not message.get("more_body", False)
            if size > self._max_bytes:
                raise self._too_large()
            return message

        return limited

    def _too_large(self) -> ApiError:
        return _closing(
            ApiError(
                413,
                f"the body is too large; expected: at most {self._max_bytes} bytes; got: more; "
                "remedy: send less, or start the server with a larger --max-body-bytes",
                code="body_too_large",
            )
        )

    def _too_slow(self) -> ApiError:
        return _closing(
            ApiError(
                408,
                f"the body is incomplete; expected: all of it within {self._seconds:g} seconds; "
                "got: a part of it; remedy: send the request at once",
                code="request_timeout",
            )
        )


def _closing(error: ApiError) -> ApiError:
    """Return an error after which the connection is closed, because the body was not read."""
    error.headers["connection"] = "close"
    return error
