"""JSON that is written by people: a repeated key is an error instead of a silent replacement."""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is not JSON, its brackets are nested too deeply, or an object has the
            same key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError("brackets are nested too deeply") from error


def parse_json_line(line: str | bytes) -> Any:
    """Return the value of a line of a JSONL file."""
    try:
        return parse_json(line.rstrip())
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} (column {error.colno})") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {repeated!r} is repeated")
    return values
