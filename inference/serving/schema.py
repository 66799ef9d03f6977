"""Request bodies with a closed set of fields, and errors that name the first wrong field."""

import json
import secrets
from abc import abstractmethod
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from inference.engine.request import OutputOptions
from inference.generation.prompts import Prompt
from inference.remote.messages import SMALLEST, Temperature
from inference.serving.api_error import ApiError
from inference.serving.decoding_options import DecodingOptions

_OTHERS = {"top_p", "top_k", "min_p", "repetition_penalty"}  # as in `generate()`
_SEEDS = 2**53  # number of seeds to choose from, all of which are exact in JavaScript

Stop = Annotated[str, Field(min_length=1, max_length=64)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
TopK = Annotated[  # 0 or -1: no limit
    int, Field(ge=-1, le=1_000_000), AfterValidator(lambda top_k: max(top_k, 0))
]
TokenIds = Annotated[list[int], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, max_length=16, fail_fast=True)]
Lists = Annotated[list[TokenIds], Field(min_length=1, max_length=16, fail_fast=True)]


class Closed(BaseModel):
    """Base class of request bodies: unknown fields are errors, and values are not converted.

    A null stands for a missing field. Many clients also send empty lists for fields of other
    servers.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _without_empty_fields(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {
            key: value
            for key, value in given.items()
            if value is not None and (key in cls.model_fields or value != [])
        }


class StreamOptions(Closed):
    include_usage: bool = False


class Extensions(Closed):
    """Options in the field `jakiro`."""

    drafting: bool = True
    details: bool = False
    metrics: bool = False


class JsonSchema(Closed):
    """A schema, which is always enforced."""

    name: str
    description: str | None = None
    content: dict[str, Any] = Field({}, alias="schema")
    strict: bool | None = None  # ignored


class ResponseFormat(Closed):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("json_schema belongs to the type json_schema")
        return self


class GenerationBody(Closed):
    """The fields that completions and chat completions share.

    OpenAI's interface has neither `top_k` nor the two fields after it, but vLLM's has them.
    """

    model: str
    temperature: Temperature | None = None
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: TopK | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=SMALLEST, le=10)
    n: int = Field(1, ge=1, le=8)
    max_tokens: int | None = Field(None, ge=1)
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] = []
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool = False
    stream_options: StreamOptions | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=300)] = {}
    response_format: ResponseFormat | None = None
    jakiro: Extensions = Extensions()
    # These fields are ignored, except store=false, which forbids learning.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None

    @model_validator(mode="after")
    def _options_of_a_stream_need_a_stream(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options requires stream=true")
        if self.jakiro.details and not self.stream:
            raise ValueError("jakiro.details requires stream=true")
        return self

    @property
    def has_usage_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    @abstractmethod
    def prompts(self) -> list[Prompt]:
        """The prompts."""

    @property
    def tool_names(self) -> frozenset[str]:
        """The functions that the text may call."""
        return frozenset()

    @property
    @abstractmethod
    def num_likeliest(self) -> int | None:
        """The number of likeliest tokens to return; None for no log-probabilities."""

    @property
    def max_new_tokens(self) -> int | None:
        """The largest number of new tokens; None for as many as there is room for."""
        return self.max_tokens

    @property
    def options(self) -> DecodingOptions:
        """The options in the engine's terms, with a random seed if the body has none."""
        record = OutputOptions(
            raw_log_probs=self.num_likeliest is not None,
            num_likeliest=self.num_likeliest or 0,
            trees=self.jakiro.details,
        )
        return DecodingOptions(
            seed=secrets.randbelow(_SEEDS) if self.seed is None else self.seed,
            choices=self.n,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            stops=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            record=None if record == OutputOptions() else record,
            drafting=self.jakiro.drafting,
            may_learn=self.store is not False,
            logit_bias={int(token): float(bias) for token, bias in self.logit_bias.items()},
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            grammar=self._grammar,
            others=self.model_dump(include=_OTHERS, exclude_none=True),
        )

    @property
    def _grammar(self) -> dict[str, Any] | None:
        """The schema that the text must fit; None if it may be any text."""
        form = self.response_format
        if form is None or form.type == "text":
            return None
        return {"type": "object"} if form.json_schema is None else form.json_schema.content


class CompletionBody(GenerationBody):
    prompt: str | TokenIds | Texts | Lists
    max_tokens: int | None = Field(16, ge=1)  # OpenAI's default
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: Literal[False] = False
    best_of: Literal[1] = 1

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts, each a text or token ids."""
        given: Any = self.prompt
        is_single = isinstance(given, str) or isinstance(given[0], int)
        return [given] if is_single else list(given)

    @property
    def num_likeliest(self) -> int | None:
        return self.logprobs


class TextPart(Closed):
    type: Literal["text"]
    text: str


class FunctionName(Closed):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(FunctionName):
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # ignored: only a call that is required follows the schema


class Tool(Closed):
    type: Literal["function"]
    function: Function


class NamedTool(Closed):
    type: Literal["function"]
    function: FunctionName


class CalledFunction(FunctionName):
    arguments: str
    parsed_arguments: Any = None  # ignored; OpenAI's client adds it


class Call(Closed):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Any = None  # ignored; OpenAI's client adds it

    @property
    def for_template(self) -> dict[str, Any]:
        """The call with its arguments as an object, which templates write as JSON."""
        arguments: Any = self.function.arguments
        with suppress(ValueError):
            arguments = json.loads(arguments)
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class Message(Closed):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        str | Annotated[list[TextPart], Field(min_length=1, max_length=1024, fail_fast=True)] | None
    ) = None
    name: str | None = None  # ignored
    tool_calls: Annotated[list[Call], Field(max_length=128)] = []
    tool_call_id: str | None = None
    parsed: Any = None  # ignored; OpenAI's client adds it

    @model_validator(mode="after")
    def _fields_fit_the_role(self) -> "Message":
        if self.content is None and not self.tool_calls:
            raise ValueError("a message needs content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls are fields of messages of the assistant")
        return self

    @property
    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it."""
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        message: dict[str, Any] = {"role": self.role, "content": text}
        if self.role == "developer":
            message["role"] = "system"
        if self.tool_calls:
            message["tool_calls"] = [call.for_template for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class ChatBody(GenerationBody):
    messages: Annotated[list[Message], Field(min_length=1, max_length=1024, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Annotated[list[Tool], Field(max_length=128)] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _fields_fit_together(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs requires logprobs=true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens cannot be combined")
        if self._grammar is not None and self.tool_names:
            raise ValueError("response_format cannot be combined with tools that may be called")
        if self._required_names - self.tool_names or (
            self.tool_choice == "required" and not self.tools
        ):
            raise ValueError("tool_choice names a function that is not among the tools")
        return self

    @property
    def tool_names(self) -> frozenset[str]:
        """The functions that the answer may call."""
        is_off = self.tool_choice == "none"
        return frozenset(() if is_off else (tool.function.name for tool in self.tools))

    @property
    def _required_names(self) -> frozenset[str]:
        """The functions of which the answer must call one; empty if it need not call any."""
        if isinstance(self.tool_choice, NamedTool):
            return frozenset({self.tool_choice.function.name})
        return self.tool_names if self.tool_choice == "required" else frozenset()

    @property
    def options(self) -> DecodingOptions:
        """The options in the engine's terms, with the tools that may be called."""
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools if self.tool_names]
        return replace(super().options, tools=tools, required_calls=self._required_names)

    @property
    def prompts(self) -> list[Prompt]:
        """The messages, which are one prompt."""
        return [[message.for_template for message in self.messages]]

    @property
    def num_likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


BodyT = TypeVar("BodyT", bound=Closed)

_SHOWN = 200  # largest number of characters of a description


def parse_body(kind: type[BodyT], content: bytes) -> BodyT:
    """Return a request body, or raise an `ApiError` that names the first wrong field."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        # If a field may have values of several types, the error of the type that was sent is shown.
        first = next((one for one in errors if not one["type"].endswith("_type")), errors[0])
        param = ".".join(str(part) for part in first["loc"] if _is_field(part)) or None
        problem = first["msg"].removeprefix("Value error, ")[:_SHOWN]
        if first["type"] == "extra_forbidden":
            problem = "is not supported; leave it out"
        raise ApiError(400, f"{param or 'the body'}: {problem}", param=param) from error


def _is_field(part: int | str) -> bool:
    """Return whether a part of a place is no type of a union."""
    return isinstance(part, int) or (part.islower() and part not in {"str", "list", "int"})
