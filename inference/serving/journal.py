"""The id of each request, its count in the metrics, and one line about it in the log."""

import logging
import time
from collections.abc import Set
from http import HTTPStatus
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference.serving.answers.reply import Reply
from inference.serving.checks.access import header_of
from inference.serving.checks.keys import User
from inference.serving.telemetry import Telemetry
from jakiro.utils.logs import get_logger

_logger = get_logger(__name__)

_BELOW = "/*"
CLOSED = 499  # status in logs and metrics of requests whose client has disconnected


class Journal:
    """Gives every request an id, counts it, and writes one line about it to the log.

    The line has the id, the name of the user, the path, the status, the seconds, and the numbers of
    tokens of the prompts and of the texts, if there are any.

    Args:
        app: application that answers the requests.
        telemetry: metrics of the server.
        paths: paths that the metrics name; all others are counted together. A path that ends with
            `/*` stands for all paths below it. A text takes many requests to such paths, so those
            that succeed are only logged at the level DEBUG.
    """

    def __init__(self, app: ASGIApp, telemetry: Telemetry, paths: Set[str]) -> None:
        self._app = app
        self._telemetry = telemetry
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request.

        Args:
            scope: request.
            receive: function that returns the client's messages.
            send: function that sends a message to the client.
        """
        request_id = _request_id(header_of(scope, b"x-request-id"))
        started, codes = time.monotonic(), [CLOSED]

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                codes.append(message["status"])
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            codes.append(500)
            raise
        finally:
            path = self._name_of(scope["path"])
            self._telemetry.requests.labels(path, str(codes[-1])).inc()
            seconds = f"{time.monotonic() - started:.3f} s"
            who = _user_name(scope)
            is_detail = path.endswith(_BELOW) and codes[-1] < HTTPStatus.BAD_REQUEST
            _logger.log(
                logging.DEBUG if is_detail else logging.INFO,
                "%s %s %s %d in %s%s",
                request_id,
                who,
                path,
                codes[-1],
                seconds,
                _tokens(scope),
            )

    def _name_of(self, path: str) -> str:
        """Return the name of a path in metrics and in the log."""
        if path in self._paths:
            return path
        groups = (own for own in self._paths if own.endswith(_BELOW))
        found = (own for own in groups if path.startswith(own.removesuffix("*")))
        return next(found, "other")


def _user_name(scope: Scope) -> str:
    user: User | None = scope["state"].get("user")
    return "-" if user is None else user.name


def _tokens(scope: Scope) -> str:
    """Return the numbers of tokens in words, or nothing if no prompt was decoded."""
    reply: Reply | None = scope["state"].get("reply")
    if reply is None:
        return ""
    return f", {reply.num_prompt_tokens} prompt tokens, {reply.num_tokens} new tokens"


def _request_id(sent: str) -> str:
    """Return the id that the client sent, if it is harmless, or a new one."""
    is_harmless = 0 < len(sent) <= 64 and sent.isascii() and sent.replace("-", "").isalnum()
    return sent if is_harmless else uuid4().hex
