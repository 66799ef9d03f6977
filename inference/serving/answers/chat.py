"""Chat completions: messages that the target's chat template turns into a prompt."""

from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from inference.engine.request import OutputOptions
from inference.serving.answers.answer import AnswerForm, answer, read_body
from inference.serving.answers.reply import TextDelta
from inference.serving.answers.schema import ChatBody
from inference.serving.answers.token_text import bytes_of_token, text_of_token
from inference.serving.scheduling.decoding_options import DecodingOptions
from inference.serving.service import Service


async def chat(request: HttpRequest) -> Response:
    """Answer a request to `/v1/chat/completions`."""
    service: Service = request.app.state.service
    body = await read_body(request, ChatBody)
    record = None
    if body.logprobs:
        record = OutputOptions(raw_log_probs=True, num_likeliest=body.top_logprobs or 0)
    options = DecodingOptions.of(body, body.max_completion_tokens or body.max_tokens, record)
    messages: list[dict[str, Any]] = [dict(message.for_template) for message in body.messages]
    form = AnswerForm(
        prefix="chatcmpl",
        kind="chat.completion",
        chunk_kind="chat.completion.chunk",
        choice=partial(_choice, service, record is not None),
        first=_first,
        chunk=partial(_chunk, service, record is not None),
    )
    return await answer(request, service, body, [messages], options, form)


def _choice(service: Service, has_log_probs: bool, delta: TextDelta) -> dict[str, Any]:
    return {
        "index": delta.index,
        "message": {"role": "assistant", "content": delta.text, "refusal": None},
        "logprobs": _log_probs(service, delta) if has_log_probs else None,
        "finish_reason": delta.finish_reason,
    }


def _first(index: int) -> dict[str, Any]:
    delta = {"role": "assistant", "content": ""}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _chunk(service: Service, has_log_probs: bool, delta: TextDelta) -> list[dict[str, Any]]:
    """Return a choice for new text, and another one for the end."""
    chunks: list[dict[str, Any]] = []
    if delta.text or delta.tokens:
        log_probs = _log_probs(service, delta) if has_log_probs else None
        chunks.append({"delta": {"content": delta.text}, "logprobs": log_probs})
    if delta.finish_reason is not None:
        chunks.append({"delta": {}, "logprobs": None})
    reasons = [None] * (len(chunks) - 1) + [delta.finish_reason]
    pairs = zip(chunks, reasons, strict=True)
    return [{"index": delta.index, **chunk, "finish_reason": reason} for chunk, reason in pairs]


def _log_probs(service: Service, delta: TextDelta) -> dict[str, Any]:
    content = [
        {
            **_token(service, token.token_id, token.log_prob),
            "top_logprobs": [_token(service, *pair) for pair in token.likeliest],
        }
        for token in delta.tokens
    ]
    return {"content": content, "refusal": None}


def _token(service: Service, token_id: int, log_prob: float) -> dict[str, Any]:
    tokenizer = service.model.tokenizer
    text, encoded = text_of_token(tokenizer, token_id), bytes_of_token(tokenizer, token_id)
    return {"token": text, "logprob": log_prob, "bytes": encoded}
