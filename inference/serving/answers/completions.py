"""Completions: prompts that are continued as they are."""

from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from inference.engine.request import OutputOptions
from inference.serving.answers.answer import AnswerForm, answer, read_body
from inference.serving.answers.reply import TextDelta
from inference.serving.answers.schema import CompletionBody
from inference.serving.answers.token_text import text_of_token
from inference.serving.scheduling.decoding_options import DecodingOptions
from inference.serving.service import Service

_MAX_TOKENS = 16  # OpenAI's default


async def complete(request: HttpRequest) -> Response:
    """Answer a request to `/v1/completions`."""
    service: Service = request.app.state.service
    body = await read_body(request, CompletionBody)
    record = None
    if body.logprobs is not None:
        record = OutputOptions(raw_log_probs=True, num_likeliest=body.logprobs)
    options = DecodingOptions.of(body, body.max_tokens or _MAX_TOKENS, record)
    choice = partial(_choice, service, record is not None)
    form = AnswerForm(
        prefix="cmpl",
        kind="text_completion",
        chunk_kind="text_completion",
        choice=choice,
        first=None,
        chunk=lambda delta: [choice(delta)],
    )
    return await answer(request, service, body, body.prompts, options, form)


def _choice(service: Service, has_log_probs: bool, delta: TextDelta) -> dict[str, Any]:
    return {
        "index": delta.index,
        "text": delta.text,
        "logprobs": _log_probs(service, delta) if has_log_probs else None,
        "finish_reason": delta.finish_reason,
    }


def _log_probs(service: Service, delta: TextDelta) -> dict[str, Any]:
    text = partial(text_of_token, service.model.tokenizer)
    return {
        "tokens": [text(token.token_id) for token in delta.tokens],
        "token_logprobs": [token.log_prob for token in delta.tokens],
        "top_logprobs": [
            # If several tokens have the same text, this form can only contain the likeliest.
            {text(other): log_prob for other, log_prob in reversed(token.likeliest)}
            for token in delta.tokens
        ],
        "text_offset": [token.offset for token in delta.tokens],
    }
