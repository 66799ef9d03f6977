"""JSON of users is parsed strictly."""

import pytest

from jakiro.utils.strict_json import parse_json


def test_values_are_parsed() -> None:
    assert parse_json('{"a": [1, {"a": null}]}') == {"a": [1, {"a": None}]}
    assert parse_json(b'"\xc3\xa9"') == "\u00e9"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' is repeated"),
        ("[" * 100_000, "nested too deeply"),
        ("{", "Expecting property name"),
        (b"\xff", "decode"),
    ],
)
def test_what_is_not_plain_json_is_refused(text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)
