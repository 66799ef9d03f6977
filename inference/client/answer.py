"""Answers of a server, assembled from the parts in which they arrive."""

import time
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, ValidationError

_SHOWN = 300  # largest number of characters of a server's message that is kept


class _Lenient(BaseModel):
    """Base class of the parts that are read; other fields are ignored."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class _Text(_Lenient):
    content: str | None = None


class _Token(_Lenient):
    token: str


class _LogProbs(_Lenient):
    tokens: list[str] | None = None  # in completions
    content: list[_Token] | None = None  # in chats

    @property
    def names(self) -> list[str]:
        return [token.token for token in self.content or ()] or list(self.tokens or ())


class _Choice(_Lenient):
    text: str | None = None
    delta: _Text | None = None
    message: _Text | None = None
    logprobs: _LogProbs | None = None
    finish_reason: str | None = None

    @property
    def own_text(self) -> str:
        chat = self.delta or self.message
        return self.text or (chat and chat.content) or ""


class _Details(_Lenient):
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class _Usage(_Lenient):
    prompt_tokens: int
    completion_tokens: int
    completion_tokens_details: _Details | None = None


class _Error(_Lenient):
    message: str = "an error without a message"


class _Part(_Lenient):
    """A response or an event of a stream."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    system_fingerprint: str | None = None
    error: _Error | str | None = None


@dataclass(frozen=True)
class TokenUsage:
    """Numbers of tokens as the server counts them."""

    prompt: int
    completion: int
    accepted: int | None  # drafted tokens that are part of the text; None if not reported
    rejected: int | None


@dataclass
class ServerAnswer:
    """An answer of a server, or the reason why there is none.

    Attributes:
        status: HTTP status; None if no response arrived.
        text: text that arrived.
        tokens: texts of the single tokens, if log-probabilities were requested and sent.
        finish_reason: reason for which the text ended; None if it did not arrive.
        usage: numbers of tokens; None if they did not arrive.
        system_fingerprint: the server's name of its configuration; None if it did not arrive.
        arrivals: seconds between the request and each part of the text; for an answer that is not
            streamed, a single number.
        seconds: seconds between the request and the end.
        is_cut: whether the client closed the stream before its end.
        error: description of what is wrong; None for a complete answer, or one that was cut.
        retry_after: value of the header `Retry-After`; None if there is none.
        refusals: number of times that the server was too busy, so that the request was repeated.
        waited: seconds that passed before the request was sent for the last time.
    """

    status: int | None = None
    text: str = ""
    tokens: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    usage: TokenUsage | None = None
    system_fingerprint: str | None = None
    arrivals: list[float] = field(default_factory=list)
    seconds: float = 0.0
    is_cut: bool = False
    error: str | None = None
    retry_after: str | None = None
    refusals: int = 0
    waited: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether the whole answer arrived."""
        return self.error is None and not self.is_cut

    @property
    def num_tokens(self) -> int:
        """The number of tokens; the number of parts of the text if it is not reported."""
        return len(self.arrivals) if self.usage is None else self.usage.completion


class AnswerReader:
    """Assembles an answer; it is created when the request is sent."""

    def __init__(self) -> None:
        self.answer = ServerAnswer()
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """The seconds since the request was sent."""
        return time.perf_counter() - self._started

    def add(self, content: str | bytes) -> None:
        """Add a response, or an event of a stream.

        Args:
            content: JSON text.
        """
        answer = self.answer
        try:
            part = _Part.model_validate_json(content)
        except ValidationError as error:
            answer.error = f"a part of the answer cannot be read: {error.errors()[0]['msg']}"
            return
        if part.error is not None:
            answer.error = _message(part.error)
        answer.system_fingerprint = part.system_fingerprint or answer.system_fingerprint
        answer.usage = _usage(part.usage) or answer.usage
        for choice in part.choices or ():
            answer.finish_reason = choice.finish_reason or answer.finish_reason
            if choice.logprobs is not None:
                answer.tokens += choice.logprobs.names
            if text := choice.own_text:
                answer.text += text
                answer.arrivals.append(self.seconds)

    def refuse(self, content: bytes) -> None:
        """Record the error of a response whose status is not 200.

        Args:
            content: body of the response.
        """
        try:
            found = _Part.model_validate_json(content).error
        except ValidationError:
            found = None
        text = _message(found) if found else content.decode("utf-8", "replace")[:_SHOWN].strip()
        self.answer.error = text or f"status {self.answer.status} without a message"

    def end(self, error: str | None = None) -> ServerAnswer:
        """Return the answer.

        Args:
            error: reason why the answer is not complete; None to find out.
        """
        answer = self.answer
        answer.seconds = self.seconds
        if answer.error is None and not answer.is_cut:
            answer.error = error
            if error is None and answer.finish_reason is None:
                answer.error = "the answer ended without a finish_reason"
        return answer


def _usage(usage: _Usage | None) -> TokenUsage | None:
    if usage is None:
        return None
    details = usage.completion_tokens_details or _Details()
    return TokenUsage(
        usage.prompt_tokens,
        usage.completion_tokens,
        details.accepted_prediction_tokens,
        details.rejected_prediction_tokens,
    )


def _message(error: _Error | str) -> str:
    return (error if isinstance(error, str) else error.message)[:_SHOWN]
