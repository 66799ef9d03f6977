"""The parts of a response that completions and chat completions share."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from inference.generation.prompts import Prompt
from inference.serving.answers.details import DetailWriter
from inference.serving.answers.events import (
    DONE,
    KEEP_ALIVE,
    EventResponse,
    event,
    unless_disconnected,
)
from inference.serving.answers.reply import Reply, TextDelta
from inference.serving.answers.schema import BodyT, GenerationBody, parse_body
from inference.serving.api_error import ApiError
from inference.serving.scheduling.decoding_options import DecodingOptions
from inference.serving.service import Service

NO_LEARNING = "jakiro-no-learning"  # header of requests from which the drafter must not learn


@dataclass(frozen=True)
class AnswerForm:
    """The form of one kind of response.

    Attributes:
        first: function that returns what precedes the text of a choice in a stream; None if
            nothing does.
    """

    prefix: str
    kind: str
    chunk_kind: str
    choice: Callable[[TextDelta], dict[str, Any]]
    first: Callable[[int], dict[str, Any]] | None
    chunk: Callable[[TextDelta], list[dict[str, Any]]]


async def read_body(request: HttpRequest, kind: type[BodyT]) -> BodyT:
    """Return the body of a request, as soon as the server is ready."""
    service: Service = request.app.state.service
    service.check_ready()
    return parse_body(kind, await request.body())


async def answer(
    request: HttpRequest,
    service: Service,
    body: GenerationBody,
    prompts: Sequence[Prompt],
    options: DecodingOptions,
    form: AnswerForm,
) -> Response:
    """Return the response to a request, streamed or not.

    Raises:
        ApiError: the request cannot be answered.
    """
    _check_model(service, body)
    if request.headers.get(NO_LEARNING):
        options = replace(options, may_learn=False)
    numbers = range(len(prompts) * options.choices)
    opened = service.open(prompts, options, request.state.user)
    head = {
        "id": f"{form.prefix}-{uuid4().hex}",
        "created": int(time.time()),
        "model": service.model.name,
        "jakiro": {"seed": options.seed},
    }
    if body.stream:
        events = _events(opened, body, numbers, form, head, service.model.details)
        # The first event is ready as soon as the request is accepted, so that refusals have their
        # own status code.
        first = await unless_disconnected(request.receive, anext(events))
        return EventResponse(first, events)
    whole = _whole(opened, numbers, form, head)
    return await unless_disconnected(request.receive, whole)


def usage_of(reply: Reply) -> dict[str, Any]:
    """Return the numbers of tokens of a complete reply, and how many drafts were accepted."""
    stats = reply.stats
    accepted, drafted = stats.accepted.total(), stats.proposed_by_proposer.total()
    prompt, completion = reply.num_prompt_tokens, reply.num_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


async def _whole(
    opened: AbstractAsyncContextManager[Reply],
    numbers: Sequence[int],
    form: AnswerForm,
    head: dict[str, Any],
) -> Response:
    """Return a response that is not streamed."""
    async with opened as reply:
        merged = [TextDelta(number, "") for number in numbers]
        async for deltas in reply.deltas():
            for delta in deltas:
                own = merged[delta.index]
                own.text += delta.text
                own.tokens += delta.tokens
                own.finish_reason = delta.finish_reason
        head["system_fingerprint"] = reply.fingerprint
        usage = usage_of(reply)

        def response() -> Response:
            choices = [form.choice(own) for own in merged]
            return JSONResponse({**head, "object": form.kind, "choices": choices, "usage": usage})

        # With many log-probabilities, this takes so long that other requests must go on meanwhile.
        return await asyncio.to_thread(response)


async def _events(
    opened: AbstractAsyncContextManager[Reply],
    body: GenerationBody,
    numbers: Sequence[int],
    form: AnswerForm,
    head: dict[str, Any],
    details: DetailWriter,
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream; the first one is empty or precedes all text."""
    chunk = {**head, "object": form.chunk_kind}
    has_usage = body.has_usage_chunk
    nothing = {"usage": None} if has_usage else {}
    is_accepted = False
    try:
        async with opened as reply:
            is_accepted = True
            chunk["system_fingerprint"] = reply.fingerprint
            heads = [] if form.first is None else [form.first(number) for number in numbers]
            yield b"".join(event({**chunk, "choices": [own], **nothing}) for own in heads)
            async for deltas in reply.deltas():
                for delta in deltas:
                    for own in _chunks(form, delta, details):
                        extra = {"jakiro": {**head["jakiro"], **own.pop("jakiro", {})}}
                        yield event({**chunk, **own, **extra, **nothing})
                if not deltas:
                    yield KEEP_ALIVE
            if has_usage:
                yield event({**chunk, "choices": [], "usage": usage_of(reply)})
        yield DONE
    except ApiError as error:
        if not is_accepted:
            raise
        yield event(error.body)


def _chunks(form: AnswerForm, delta: TextDelta, writer: DetailWriter) -> list[dict[str, Any]]:
    """Return the fields of the chunks for new text; the first one has the details, if any."""
    has_choice = delta.text or delta.tokens or delta.finish_reason is not None
    choices = form.chunk(delta) if has_choice else []
    chunks: list[dict[str, Any]] = [{"choices": [choice]} for choice in choices]
    if delta.details is not None:
        chunks = chunks or [{"choices": []}]
        chunks[0]["jakiro"] = writer.data(delta.index, delta.details)
    return chunks


def _check_model(service: Service, body: GenerationBody) -> None:
    if body.model != service.model.name:
        raise ApiError(
            404,
            f"the model is not served here; expected: {service.model.name}",
            param="model",
            code="model_not_found",
        )
