"""The answer to a request, whole or as server-sent events, which ends with its client."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from typing import Any, TypeVar
from uuid import uuid4

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from inference.serving.api_error import ApiError
from inference.serving.formats import AnswerForm, Data
from inference.serving.reply import Reply, TextDelta
from inference.serving.schema import parse_body
from inference.serving.service import Service

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


async def answer(request: HttpRequest, kind: type[AnswerForm]) -> Response:
    """Return the answer to a request, streamed or not.

    Raises:
        ApiError: the request cannot be answered.
    """
    service: Service = request.app.state.service
    service.check_ready()  # before the body is read
    body = parse_body(kind.body, await request.body())
    service.model.check_name(body.model)
    options = body.options
    head = {
        "id": f"{kind.prefix}-{uuid4().hex}",
        "created": int(time.time()),
        "model": service.model.name,
        "jakiro": {"seed": options.seed},
    }
    num_choices = len(body.prompts) * options.choices
    form = kind(service.model.tokenizer, body, num_choices, head)
    opened = service.open(body.prompts, options, request.state.user)
    if not body.stream:
        return await unless_disconnected(request.receive, _whole(opened, form))
    events = _events(opened, form)
    # The first event is ready as soon as the request is accepted, so that refusals have their own
    # status code.
    await unless_disconnected(request.receive, anext(events))
    return EventResponse(events)


async def _whole(opened: AbstractAsyncContextManager[Reply], form: AnswerForm) -> Response:
    async with opened as reply:
        merged = [TextDelta(number) for number in range(form.num_choices)]
        async for delta in reply.deltas():
            choice = merged[delta.index]
            choice.text += delta.text
            choice.tokens += delta.tokens
            choice.finish_reason = delta.finish_reason
        head = {**form.head, "system_fingerprint": reply.fingerprint, "object": form.kind}
        fields = form.end(reply)

        def response() -> Response:
            return JSONResponse({**head, "choices": list(map(form.choice, merged)), **fields})

        # With many log-probabilities, this takes so long that other requests must go on meanwhile.
        return await asyncio.to_thread(response)


async def _events(
    opened: AbstractAsyncContextManager[Reply], form: AnswerForm
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream, of which the first one is empty."""
    is_accepted = False
    try:
        async with opened as reply:
            is_accepted = True
            yield b""
            async for data in _stream(reply, form):
                yield event(data)
        yield DONE
    except ApiError as error:
        if not is_accepted:
            raise
        yield event(error.body)


async def _stream(reply: Reply, form: AnswerForm) -> AsyncIterator[Data]:
    chunk = {**form.head, "object": form.chunk_kind, "system_fingerprint": reply.fingerprint}
    if form.has_usage:
        chunk["usage"] = None
    for choice in form.heads():
        yield {**chunk, "choices": [choice]}
    async for delta in reply.deltas():
        for fields in _chunks(form, delta):
            yield {**chunk, **fields, "jakiro": form.head["jakiro"] | fields["jakiro"]}
    if end := form.end(reply):
        yield {**chunk, "choices": [], **end}


def _chunks(form: AnswerForm, delta: TextDelta) -> list[Data]:
    """Return the fields of the chunks for new text; the first one has the details, if any."""
    has_choice = delta.text or delta.tokens or delta.finish_reason is not None
    choices = [[choice] for choice in form.parts(delta)] if has_choice else []
    if delta.details and not choices:
        choices = [[]]
    details = [delta.details or {}, *[{}] * len(choices)]
    return [
        {"choices": part, "jakiro": extra} for part, extra in zip(choices, details, strict=False)
    ]


def event(data: object) -> bytes:
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
