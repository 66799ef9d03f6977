"""Request bodies from JSON, and errors that name the first wrong field."""

import re
from typing import TypeVar

from pydantic import ValidationError

from inference.serving.api_error import ApiError
from inference.serving.schema import Closed

_PAGE = "the guide to `jakiro serve` lists the supported fields"
_MAX_ERRORS = 1000  # number of errors of a body from which they are not looked at one by one
_SMALL = 100_000  # size in bytes up to which errors show parts of a body
_SHOWN = 80  # largest number of characters of a value that an error shows

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
        raise _explained(error, len(content)) from error


def _explained(error: ValidationError, size: int) -> ApiError:
    """Return an error that names the first wrong field.

    Args:
        error: all errors of a body.
        size: size of the body in bytes; parts of a large body are not shown, which would take long.
    """
    if error.error_count() > _MAX_ERRORS:
        return ApiError(
            400,
            "the body cannot be used; expected: the fields of OpenAI's interface; "
            f"got: {error.error_count()} errors; remedy: correct them; {_PAGE}",
        )
    has_input = size <= _SMALL
    found = error.errors(include_url=False, include_context=False, include_input=has_input)
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
        expected = first["msg"].removeprefix("Value error, ")
        message = f"{param or 'the body'} cannot be used; expected: {expected}; got: "
        remedy = f"correct it; {_PAGE}"
    shown = _shown(first["input"]) if has_input else "something else"
    return ApiError(400, f"{message}{shown}; remedy: {remedy}", param=param)


_SENTENCE = re.compile(r"^Invalid JSON: ")


_TYPES = {"str", "list", "int", "text", "ids", "texts", "lists"}


def _is_field(part: int | str) -> bool:
    """Return whether a part of a location is a field or index, and not a type of a union."""
    return isinstance(part, int) or (part.isidentifier() and part not in _TYPES)


def _shown(value: object) -> str:
    """Return the beginning of a value, without writing all of a large one."""
    if isinstance(value, str):
        text = repr(value[:_SHOWN])
    elif isinstance(value, list | dict):
        text = f"a {'list' if isinstance(value, list) else 'mapping'} of {len(value)}"
    else:
        text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
