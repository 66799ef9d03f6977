"""Request bodies with a closed set of fields, and errors in OpenAI's form."""

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from jakiro.errors import EngineStopped, JakiroError, PromptError, ResourceError

_PAGE = "the guide to `jakiro serve` lists the supported fields"
_SHOWN = 80  # largest number of characters of a value that an error shows

Stop = Annotated[str, Field(min_length=1, max_length=64)]
Off = Literal[False] | None
Zero = Annotated[float, Field(ge=0, le=0)] | None


class ApiError(Exception):
    """An error that is sent to the client.

    Args:
        status: HTTP status code.
        message: description of the problem, with the expected value, the value found, and the
            remedy.
        kind: kind of the error, OpenAI's `type`.
        param: field of the request that is wrong; None if there is none.
        code: short name of the error; None if there is none.
        retry_after: seconds after which the client may try again; None to leave this open.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {} if retry_after is None else {"retry-after": str(retry_after)}
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def api_error_of(error: JakiroError) -> ApiError:
    """Return the error that tells a client about one of ours."""
    if isinstance(error, PromptError):
        return ApiError(400, str(error))
    if isinstance(error, EngineStopped | ResourceError):
        return ApiError(503, str(error), kind="server_error", code="unavailable")
    return ApiError(500, str(error), kind="server_error", code="decoding_failed")


class Closed(BaseModel):
    """Base class of request bodies: unknown fields are errors, and values are not converted."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


class StreamOptions(Closed):
    """Options of a stream."""

    include_usage: bool = False


class Extensions(Closed):
    """Options that OpenAI's interface does not have, in the field `jakiro`."""

    top_k: int | None = Field(None, ge=1, le=1_000_000)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    details: bool | None = None
    drafts: bool | None = None


class GenerationBody(Closed):
    """The fields that completions and chat completions share."""

    model: str
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=8)
    max_tokens: int | None = Field(None, ge=1)
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    jakiro: Extensions | None = None
    # Only the values that change nothing are accepted.
    presence_penalty: Zero = None
    frequency_penalty: Zero = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    # These fields are ignored.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options requires stream=true")
        return self

    @model_validator(mode="after")
    def _details_need_a_stream(self) -> "GenerationBody":
        if self.has_details and not self.stream:
            raise ValueError("jakiro.details requires stream=true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def has_details(self) -> bool:
        """Whether the chunks of a stream have the origin of each token, and the draft trees."""
        return self.jakiro is not None and bool(self.jakiro.details)

    @property
    def has_usage_chunk(self) -> bool:
        """Whether the last chunk of a stream has the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(GenerationBody):
    """The body of a completion request."""

    prompt: (
        str
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=16)]
        | Annotated[list[list[int]], Field(min_length=1, max_length=16)]
    )
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: Off = None
    best_of: Literal[1] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        given: Any = self.prompt
        is_single = isinstance(given, str) or isinstance(given[0], int)
        return [given] if is_single else list(given)


class TextPart(Closed):
    """A part of a message with several parts."""

    type: Literal["text"]
    text: str


class Message(Closed):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=1024)]

    @property
    def for_template(self) -> dict[str, str]:
        """The message as chat templates expect it."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ResponseFormat(Closed):
    """The format of an answer, which is always text."""

    type: Literal["text"]


class ChatBody(GenerationBody):
    """The body of a chat completion request."""

    messages: list[Message] = Field(min_length=1, max_length=1024)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _fields_fit_together(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs requires logprobs=true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens cannot be combined")
        return self


BodyT = TypeVar("BodyT", bound=Closed)


def parse_body(kind: type[BodyT], content: bytes) -> BodyT:
    """Return a request body.

    Args:
        kind: class of the body.
        content: JSON text.

    Raises:
        ApiError: the text is not JSON, or a field is unknown, missing or wrong.
    """
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise _explained(error) from error


def _explained(error: ValidationError) -> ApiError:
    """Return an error that names the first wrong field."""
    found = error.errors(include_url=False, include_context=False)
    # If a field may have values of several types, the error of the type that was sent says more.
    first = next((own for own in found if not own["type"].endswith("_type")), found[0])
    path = [str(part) for part in first["loc"] if _is_field(part)]
    param = ".".join(path) or None
    if first["type"] == "json_invalid":
        return ApiError(
            400,
            "the body cannot be read; expected: a JSON object; "
            f"got: {_SENTENCE.sub('', first['msg'])[:_SHOWN]}; remedy: send valid JSON in UTF-8",
        )
    if first["type"] == "extra_forbidden":
        message = f"{param} is not supported; expected: no such field; got: "
        remedy = f"leave it out; {_PAGE}"
    elif first["type"] == "missing":
        return ApiError(
            400,
            f"{param} is missing; expected: this field; got: a body without it; remedy: add it",
            param=param,
        )
    else:
        message = f"{param or 'the body'} cannot be used; expected: {first['msg']}; got: "
        remedy = f"correct it; {_PAGE}"
    shown = _shown(first["input"])
    return ApiError(400, f"{message}{shown}; remedy: {remedy}", param=param)


_SENTENCE = re.compile(r"^Invalid JSON: ")


def _is_field(part: int | str) -> bool:
    """Return whether a part of a location is a field or index, and not a type of a union."""
    return isinstance(part, int) or (part.isidentifier() and part not in {"str", "list", "int"})


def _shown(value: object) -> str:
    """Return the beginning of a value, without writing all of a large one."""
    if isinstance(value, str):
        text = repr(value[:_SHOWN])
    elif isinstance(value, list | dict):
        text = f"a {'list' if isinstance(value, list) else 'mapping'} of {len(value)}"
    else:
        text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
