"""Random JSON schemas, whose texts are short, and a check of values against them."""

from random import Random
from typing import Any


def random_schema(random: Random, depth: int = 2) -> dict[str, Any]:
    """Return a schema of an object with up to three fields."""
    count = random.randint(1, 3)
    names = random.sample(["a", "id", "the name", "ü", "x_1", "tags"], count)
    fields = {name: _value(random, depth - 1) for name in names}
    required = [name for name in names if random.random() < 0.7]
    return {
        "type": "object",
        "properties": fields,
        "required": required,
        "additionalProperties": False,
    }


def _value(random: Random, depth: int) -> dict[str, Any]:
    simple: list[dict[str, Any]] = [
        {"type": "integer", "minimum": -3, "maximum": random.randint(0, 2000)},
        {"type": "string", "maxLength": random.randint(0, 4)},
        {"type": "string", "pattern": "^[a-c]{1,3}$"},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["red", "green", 5, None]},
        {"const": "fixed"},
    ]
    if depth == 0 or random.random() < 0.5:
        return random.choice(simple)
    return random.choice(
        [
            random_schema(random, depth),
            {"type": "array", "items": _value(random, 0), "minItems": 1, "maxItems": 2},
            {"anyOf": [_value(random, 0), {"type": "null"}]},
        ]
    )


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Return whether a value has a schema of `random_schema`."""
    if "anyOf" in schema:
        return any(fits(value, one) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    kinds: dict[str, Any] = {
        "object": lambda: (
            value.keys() <= schema["properties"].keys()
            and value.keys() >= set(schema["required"])
            and all(fits(item, schema["properties"][name]) for name, item in value.items())
        ),
        "array": lambda: (
            1 <= len(value) <= schema["maxItems"]
            and all(fits(item, schema["items"]) for item in value)
        ),
        "integer": lambda: schema["minimum"] <= value <= schema["maximum"],
        "string": lambda: (
            set(value) <= set("abc") and 1 <= len(value) <= 3
            if "pattern" in schema
            else len(value) <= schema["maxLength"]
        ),
        "boolean": lambda: True,
        "null": lambda: True,
    }
    types = {"object": dict, "array": list, "integer": int, "string": str, "boolean": bool}
    return type(value) is types.get(schema["type"], type(None)) and kinds[schema["type"]]()
