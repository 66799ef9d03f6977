"""Connections, with limits of their number and of the time that clients may take."""

import asyncio
import json
import socket
from asyncio import TimerHandle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from inference.serving.api_error import ApiError

_RETRY_SECONDS = 1


@dataclass(frozen=True)
class ConnectionLimits:
    """The limits of what clients may take.

    Attributes:
        count: largest number of connections at the same time.
        receive_seconds: seconds in which the head of a request must arrive, and after an early
            answer the rest of the body.
        stall_seconds: seconds after which a client that takes no data is disconnected.
    """

    count: int
    receive_seconds: float
    stall_seconds: float


class Connection(H11Protocol):
    """A connection that ends if its client is too slow.

    This is the case if it sends a head, or the rest of a body that is already answered, too slowly,
    or takes a response too slowly.

    Args:
        limits: limits of this connection and of the number of connections.
        on_closed: function that is called with the reason if the server closes the connection.
        **options: as for `H11Protocol`.
    """

    def __init__(
        self, limits: ConnectionLimits, on_closed: Callable[[str], object], **options: Any
    ) -> None:
        super().__init__(**options)
        self._limits = limits
        self._on_closed = on_closed
        self._head_timer: TimerHandle | None = None
        self._rest_timer: TimerHandle | None = None
        self._stall_timer: TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request, or refuse the connection if there are too many.

        Args:
            transport: transport of the connection.
        """
        super().connection_made(transport)
        # Otherwise, the body after a head, and each event, may wait 40 ms until the client confirms
        # what was sent before. asyncio only does this for sockets that it opened itself.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) > self._limits.count:
            self._on_closed("too_many")
            self._refuse(_too_many(self._limits.count))
        else:
            self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """End everything that waits for the client.

        Args:
            exc: cause; None if the connection was closed.
        """
        self._stop_head_timer()
        self._stop_rest_timer()
        self._stop_stall_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Process bytes that the client has sent.

        Args:
            data: the bytes.
        """
        super().data_received(data)
        self._watch_head()
        self._watch_rest()

    def on_response_complete(self) -> None:
        """Wait for the next request, and for the client to take the rest of the response."""
        super().on_response_complete()
        self._watch_head()
        self._watch_rest()
        if self._stall_timer is None and self.transport.get_write_buffer_size() > 0:
            self._stall_timer = self._later(self._limits.stall_seconds, self._end_if_unread)

    def pause_writing(self) -> None:
        """Give the client some time to take the data that it was sent."""
        super().pause_writing()
        self._stop_stall_timer()
        self._stall_timer = self._later(self._limits.stall_seconds, self._abort)

    def resume_writing(self) -> None:
        """Send more data, because the client has taken enough of it."""
        self._stop_stall_timer()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not a request.

        Args:
            msg: description of the problem.
        """
        self._on_closed("invalid")
        self._refuse(
            ApiError(
                400,
                f"the request cannot be read: {msg} expected: HTTP/1.1; got: something else; "
                "remedy: use a client for HTTP",
                code="invalid_http",
            )
        )

    def _watch_head(self) -> None:
        """Limit the time in which the head of the next request must arrive."""
        is_waiting = self.conn.their_state is h11.IDLE and not self.transport.is_closing()
        if not is_waiting:
            self._stop_head_timer()
        elif self._head_timer is None:
            self._head_timer = self._later(self._limits.receive_seconds, self._end_without_head)

    def _watch_rest(self) -> None:
        """Limit the time in which the rest of a body that is already answered must arrive.

        The connection is not closed at once, because a client that is still sending would see a
        lost connection instead of the answer.
        """
        is_answered = self.conn.our_state is h11.DONE and not self.transport.is_closing()
        if not (is_answered and self.conn.their_state is h11.SEND_BODY):
            self._stop_rest_timer()
        elif self._rest_timer is None:
            self._rest_timer = self._later(self._limits.receive_seconds, self._end_without_rest)

    def _end_without_rest(self) -> None:
        self._on_closed("slow_body")
        self.transport.close()
        self._end_if_unread()

    def _end_without_head(self) -> None:
        has_begun = bool(self.conn.trailing_data[0])
        if has_begun:
            self._on_closed("slow_head")
            self._refuse(_too_slow(self._limits.receive_seconds))
        else:
            self.transport.close()
        self._end_if_unread()

    def _end_if_unread(self) -> None:
        """Disconnect a client that has not taken all of the last response by now."""
        self._stall_timer = None
        is_over = self.cycle is None or self.cycle.response_complete
        if is_over and self.transport.get_write_buffer_size() > 0:
            self._abort()

    def _abort(self) -> None:
        self._on_closed("stalled")
        self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        """Send an error, if no response has begun, and close the connection."""
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            body = json.dumps(error.body).encode()
            fields = {
                "content-type": "application/json",
                "content-length": str(len(body)),
                "connection": "close",
                **error.headers,
            }
            head = h11.Response(status_code=error.status, headers=list(fields.items()))
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the application must not send another response
            self.cycle.message_event.set()
        self.transport.close()

    def _later(self, seconds: float, action: Callable[[], object]) -> TimerHandle:
        return self.loop.call_later(seconds, action)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_rest_timer(self) -> None:
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


def _too_many(count: int) -> ApiError:
    return ApiError(
        503,
        f"there are too many connections; expected: at most {count}; got: one more; "
        "remedy: use fewer connections, or start the server with more --max-connections",
        kind="server_error",
        code="too_many_connections",
        retry_after=_RETRY_SECONDS,
    )


def _too_slow(seconds: float) -> ApiError:
    return ApiError(
        408,
        f"the head of the request is incomplete; expected: all of it within {seconds:g} seconds; "
        "got: a part of it; remedy: send the request at once",
        code="request_timeout",
    )
