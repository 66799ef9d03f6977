"""Server-sent events, and the end of work for clients that have disconnected."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def event(data: object) -> bytes:
    """Return an event with JSON data."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode("utf-8", "replace")


class Disconnected(Exception):
    """The client has closed its connection, or was disconnected because it takes no data."""


class EventResponse(StreamingResponse):
    """A response that sends events as they are made, and stops if the client disconnects.

    Args:
        events: events from a generator that may have begun; closed at the end, also if the client
            disconnects.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        async with aclosing(self._events):
            with suppress(Disconnected):
                await unless_disconnected(receive, self.stream_response(send))


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of work, which is cancelled if the client disconnects first.

    Args:
        receive: function that returns the client's messages; the body must have been read.

    Raises:
        Disconnected: the client has disconnected.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
