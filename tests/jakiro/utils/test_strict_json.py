"""JSON of users is parsed strictly."""

import pytest

from jakiro.utils.strict_json import parse_json, parse_json_line


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


def test_a_mistake_in_a_line_is_named_by_its_column() -> None:
    assert parse_json_line(b'{"a": 1}\r\n') == {"a": 1}
    with pytest.raises(ValueError, match=r"^Expecting ',' delimiter \(column 8\)$"):
        parse_json_line('{"a": 1\n')
    with pytest.raises(ValueError, match="the key 'a' is repeated"):
        parse_json_line('{"a": 1, "a": 2}\n')
