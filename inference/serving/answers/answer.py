"""The parts of an answer that completions and chat completions share."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, ClassVar
from uuid import uuid4

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from transformers import PreTrainedTokenizerBase

from inference.serving.answers.events import (
    DONE,
    KEEP_ALIVE,
    EventResponse,
    event,
    unless_disconnected,
)
from inference.serving.answers.reply import Reply, TextDelta
from inference.serving.answers.schema import GenerationBody, parse_body
from inference.serving.api_error import ApiError
from inference.serving.service import Service

NO_LEARNING = "jakiro-no-learning"  # header of requests from which the drafter must not learn

Data = dict[str, Any]


class AnswerForm(ABC):
    """The form of one kind of answer: how its choices, whole or in chunks, become JSON data."""

    body: ClassVar[type[GenerationBody]]
    prefix: ClassVar[str]  # of the id
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, tokenizer: PreTrainedTokenizerBase, has_log_probs: bool) -> None:
        self.tokenizer = tokenizer
        self.has_log_probs = has_log_probs

    @abstractmethod
    def choice(self, delta: TextDelta) -> Data:
        """Return a choice with its text."""

    def heads(self, numbers: range) -> list[Data]:
        """Return the choices that precede all text of a stream."""
        return []

    def parts(self, delta: TextDelta) -> list[Data]:
        """Return the choices of a stream's chunks for new text."""
        return [self.choice(delta)]


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
    if request.headers.get(NO_LEARNING):
        options = replace(options, may_learn=False)
    form = kind(service.model.tokenizer, body.num_likeliest is not None)
    numbers = range(len(body.prompts) * options.choices)
    opened = service.open(body.prompts, options, request.state.user)
    head = {
        "id": f"{kind.prefix}-{uuid4().hex}",
        "created": int(time.time()),
        "model": service.model.name,
        "jakiro": {"seed": options.seed},
    }
    if not body.stream:
        whole = _whole(opened, numbers, form, head)
        return await unless_disconnected(request.receive, whole)
    events = _events(opened, body.has_usage_chunk, numbers, form, head)
    # The first event is ready as soon as the request is accepted, so that refusals have their own
    # status code.
    await unless_disconnected(request.receive, anext(events))
    return EventResponse(events)


def usage_of(reply: Reply) -> Data:
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
    opened: AbstractAsyncContextManager[Reply], numbers: range, form: AnswerForm, head: Data
) -> Response:
    """Return an answer that is not streamed."""
    async with opened as reply:
        merged = [TextDelta(number) for number in numbers]
        async for delta in reply.deltas():
            if delta is not None:
                choice = merged[delta.index]
                choice.text += delta.text
                choice.tokens += delta.tokens
                choice.finish_reason = delta.finish_reason
        head |= {"system_fingerprint": reply.fingerprint, "object": form.kind}
        usage = usage_of(reply)

        def response() -> Response:
            return JSONResponse({**head, "choices": list(map(form.choice, merged)), "usage": usage})

        # With many log-probabilities, this takes so long that other requests must go on meanwhile.
        return await asyncio.to_thread(response)


async def _events(
    opened: AbstractAsyncContextManager[Reply],
    has_usage: bool,
    numbers: range,
    form: AnswerForm,
    head: Data,
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream, of which the first one is empty."""
    is_accepted = False
    try:
        async with opened as reply:
            is_accepted = True
            yield b""
            async for data in _stream(reply, has_usage, numbers, form, head):
                yield KEEP_ALIVE if data is None else event(data)
        yield DONE
    except ApiError as error:
        if not is_accepted:
            raise
        yield event(error.body)


async def _stream(
    reply: Reply, has_usage: bool, numbers: range, form: AnswerForm, head: Data
) -> AsyncIterator[Data | None]:
    """Yield the chunks of a stream, and None if nothing arrives."""
    chunk = {**head, "object": form.chunk_kind, "system_fingerprint": reply.fingerprint}
    if has_usage:
        chunk["usage"] = None
    for choice in form.heads(numbers):
        yield {**chunk, "choices": [choice]}
    async for delta in reply.deltas():
        if delta is None:
            yield None
            continue
        for fields in _chunks(form, delta):
            yield {**chunk, **fields, "jakiro": head["jakiro"] | fields["jakiro"]}
    if has_usage:
        yield {**chunk, "choices": [], "usage": usage_of(reply)}


def _chunks(form: AnswerForm, delta: TextDelta) -> list[Data]:
    """Return the fields of the chunks for new text; the first one has the details, if any."""
    has_choice = delta.text or delta.tokens or delta.finish_reason is not None
    choices = [[choice] for choice in form.parts(delta)] if has_choice else [[]]
    details = [delta.details or {}] + [{}] * (len(choices) - 1)
    return [{"choices": own, "jakiro": extra} for own, extra in zip(choices, details, strict=True)]
