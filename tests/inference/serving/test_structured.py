"""Structured output and tools with OpenAI's own client, over a socket."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import openai
import pytest
from helpers.models import tiny_llama
from helpers.serving import MODEL, running
from helpers.templates import CHATML, HERMES_TOOLS, LLAMA_TOOLS
from helpers.tokenizers import tiny_tokenizer
from openai import BadRequestError, OpenAI
from pydantic import BaseModel, Field

from inference import SpeculativeDecoder
from inference.drafters.lookup import LookupDrafter

QUESTION: Any = [{"role": "user", "content": "Who?"}]
OPTIONS: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_completion_tokens": 600}
Short = Annotated[str, Field(max_length=3)]


class Address(BaseModel):
    city: Literal["Rome", "Köln"]
    number: Annotated[int, Field(ge=0, le=20)]


class Person(BaseModel):
    is_tall: bool
    address: Address
    tags: Annotated[list[Short], Field(max_length=2)]


class Weather(BaseModel):
    """Tell the weather."""

    place: Address
    days: Annotated[int, Field(ge=1, le=9)]


def _served(template: str | dict[str, str]) -> Iterator[OpenAI]:
    tokenizer = tiny_tokenizer(None)
    tokenizer.chat_template = template
    model = tiny_llama(vocab=len(tokenizer) + 5, max_position_embeddings=2048, eos_token_id=0)
    decoder = SpeculativeDecoder(model, LookupDrafter(), tokenizer, tree="fixed")
    with running(decoder, capacity=2000) as server, server.client() as client:
        yield client


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    """A client of a target whose template has tools in the form of Hermes."""
    yield from _served(HERMES_TOOLS)


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_client_parses_an_answer_into_a_class(client: OpenAI, temperature: int) -> None:
    found = client.beta.chat.completions.parse(
        **OPTIONS, response_format=Person, temperature=temperature, seed=1, n=2
    )
    for choice in found.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Person)
    with client.beta.chat.completions.stream(
        **OPTIONS, response_format=Person, temperature=temperature, seed=1
    ) as stream:
        final = stream.get_final_completion().choices[0].message
    assert final.parsed == found.choices[0].message.parsed


def test_any_object_and_completions_have_formats(client: OpenAI) -> None:
    chat = client.chat.completions.create(
        **OPTIONS | {"max_completion_tokens": 40},
        temperature=1,
        seed=2,
        response_format={"type": "json_object"},
    ).choices[0]
    assert str(chat.message.content).startswith("{")
    if chat.finish_reason == "stop":
        assert isinstance(json.loads(str(chat.message.content)), dict)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["ab", 7]}}}
    text = client.completions.create(
        model=MODEL, prompt="a", extra_body={"response_format": form}, logprobs=1, stop=["!"]
    ).choices[0]
    assert json.loads(text.text) in ("ab", 7)
    assert text.finish_reason == "stop"
    asked = OPTIONS | {"max_completion_tokens": 2}
    plain = client.chat.completions.create(**asked, response_format={"type": "text"})
    assert plain.choices


TOOLS: Any = [openai.pydantic_function_tool(Weather, name="weather")]


@pytest.mark.parametrize(
    "template",
    [{"default": CHATML, "tool_use": HERMES_TOOLS}, LLAMA_TOOLS],
    ids=["hermes", "llama"],
)
def test_calls_of_tools_go_out_and_come_back(template: str | dict[str, str]) -> None:
    for client in _served(template):
        named = {"type": "function", "function": {"name": "weather"}}
        for choice in ("required", named):
            asked: Any = OPTIONS | {"tools": TOOLS, "tool_choice": choice, "temperature": 0}
            answer = client.chat.completions.create(**asked).choices[0]
            assert answer.finish_reason == "tool_calls"
            assert answer.message.content is None
            assert answer.message.tool_calls is not None
            (call,) = answer.message.tool_calls
            assert call.function.name == "weather"
            Weather.model_validate_json(call.function.arguments)
            with client.beta.chat.completions.stream(**asked, logprobs=True) as stream:
                streamed = stream.get_final_completion().choices[0]
        assert streamed.finish_reason == "tool_calls"
        assert streamed.message.tool_calls is not None
        (streamed_call,) = streamed.message.tool_calls
        assert streamed_call.function.arguments == call.function.arguments
        assert isinstance(streamed_call.function.parsed_arguments, Weather)
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        history: Any = [*QUESTION, streamed.message, result]
        asked = OPTIONS | {"messages": history, "max_completion_tokens": 2}
        longer = client.chat.completions.create(**asked, tools=TOOLS)
        shorter = client.chat.completions.create(**asked)
        assert longer.usage is not None
        assert shorter.usage is not None
        assert longer.usage.prompt_tokens > shorter.usage.prompt_tokens + 100


def test_without_a_call_the_answer_is_the_text(client: OpenAI) -> None:
    asked: Any = OPTIONS | {"temperature": 0, "max_completion_tokens": 20}
    with_tools = client.chat.completions.create(**asked, tools=TOOLS)
    assert with_tools.choices[0].message.content
    assert with_tools.choices[0].message.tool_calls is None
    chunks = client.chat.completions.create(**asked, tools=TOOLS, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == with_tools.choices[0].message.content
    off = client.chat.completions.create(**asked, tools=TOOLS, tool_choice="none")
    assert off.choices == client.chat.completions.create(**asked).choices


FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}}
BAD = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"uniqueItems": True}}}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"response_format": BAD}, "uniqueItems"),
        ({"response_format": {"type": "json_schema"}}, "json_schema belongs"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": FORM, "tools": TOOLS}, "cannot be combined"),
        ({"tool_choice": "required"}, "not among the tools"),
        (
            {
                "tools": TOOLS,
                "tool_choice": {"type": "function", "function": {"name": "time"}},
            },
            "not among the tools",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused(client: OpenAI, fields: Any, reason: str) -> None:
    with pytest.raises(BadRequestError, match=reason):
        client.chat.completions.create(**OPTIONS, **fields)


def test_a_template_without_tools_refuses_them() -> None:
    for client in _served(CHATML):
        with pytest.raises(BadRequestError, match="template has no tools"):
            client.chat.completions.create(**OPTIONS, tools=TOOLS)
