"""Request bodies with a closed set of fields, and errors that name the first wrong field."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from inference.remote.messages import SMALLEST, Temperature
from inference.serving.api_error import ApiError

_MAX_BIASES = 300

Stop = Annotated[str, Field(min_length=1, max_length=64)]
Penalty = Annotated[float, Field(ge=-2, le=2)] | None
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenIds = Annotated[list[int], Field(min_length=1, fail_fast=True)]


def _kind_of(value: object) -> str:
    """Return the kind of a prompt by its first element, so that only this kind is tried."""
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, list):
        return "lists"
    if isinstance(first, str):
        return "texts"
    return "ids" if isinstance(value, list) else "text"


PromptField = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[list[str], Field(min_length=1, max_length=16, fail_fast=True), Tag("texts")]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=16, fail_fast=True), Tag("lists")],
    Discriminator(_kind_of),
]


def _few(value: object) -> object:
    """Refuse a mapping with many entries, before they are checked one by one."""
    if isinstance(value, dict) and len(value) > _MAX_BIASES:
        raise ValueError(f"at most {_MAX_BIASES} entries")
    return value


class Closed(BaseModel):
    """Base class of request bodies: unknown fields are errors, and values are not converted.

    Many clients send null or an empty list for fields that ask for nothing.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _without_empty_fields(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = cls.model_fields
        return {key: own for key, own in given.items() if key in known or own not in (None, [])}


class StreamOptions(Closed):
    """Options of a stream."""

    include_usage: bool = False


class Selection(Closed):
    """Options that OpenAI's interface does not have, but vLLM's has; top_k = 0 or -1: no limit."""

    top_k: int | None = Field(None, ge=-1, le=1_000_000)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=SMALLEST, le=10)

    @property
    def selection(self) -> dict[str, float]:
        """The options that are set, by their names in `generate()`."""
        given = {name: getattr(self, name) for name in Selection.model_fields}
        return {name: max(own, 0) for name, own in given.items() if own is not None}


class Extensions(Selection):
    """Options in the field `jakiro`."""

    drafting: bool = True
    details: bool = False


class GenerationBody(Selection):
    """The fields that completions and chat completions share."""

    model: str
    temperature: Temperature | None = None
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=8)
    max_tokens: int | None = Field(None, ge=1)
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    logit_bias: Annotated[dict[TokenId, Bias], BeforeValidator(_few)] | None = None
    jakiro: Extensions | None = None
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
    def biases(self) -> dict[int, float]:
        """The number to add to the logit of each token."""
        return {int(token): float(bias) for token, bias in (self.logit_bias or {}).items()}

    @property
    def has_details(self) -> bool:
        """Whether the chunks of a stream have the origin of each token, and the draft trees."""
        return self.jakiro is not None and self.jakiro.details

    @property
    def has_usage_chunk(self) -> bool:
        """Whether the last chunk of a stream has the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(GenerationBody):
    """The body of a completion request."""

    prompt: PromptField
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: Literal[False] | None = None
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
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=1024, fail_fast=True)]
    name: str | None = None  # ignored

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

    messages: Annotated[list[Message], Field(min_length=1, max_length=1024, fail_fast=True)]
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

_SHOWN = 200  # largest number of characters of a description


def parse_body(kind: type[BodyT], content: bytes) -> BodyT:
    """Return a request body."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise _explained(error) from error


def _explained(error: ValidationError) -> ApiError:
    """Return an error that names the first wrong field."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    # If a field may have values of several types, the error of the type that was sent is shown.
    first = next((own for own in errors if not own["type"].endswith("_type")), errors[0])
    param = ".".join(str(part) for part in first["loc"] if _is_field(part)) or None
    problem = first["msg"].removeprefix("Value error, ")[:_SHOWN]
    if first["type"] == "extra_forbidden":
        problem = "is not supported; see the guide to `jakiro serve`"
    return ApiError(400, f"{param or 'the body'}: {problem}", param=param)


_TYPES = {"str", "list", "int", "text", "ids", "texts", "lists"}  # of unions


def _is_field(part: int | str) -> bool:
    return isinstance(part, int) or (part.isidentifier() and part not in _TYPES)
