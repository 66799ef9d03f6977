"""Calls of tools in texts, however they are cut into pieces."""

import json
from random import Random

import pytest

from inference.serving.tool_calls import ToolCallParser

WEATHER = '{"name": "weather", "arguments": {"city": "Köln <a>"}}'
LLAMA = WEATHER.replace("arguments", "parameters")
TIME = '{"name": "time", "arguments": {}}'
CASES = {
    "hermes": (f"<tool_call>\n{WEATHER}\n</tool_call>", "", ["weather"]),
    "after text": (f"I look. \n<tool_call>{WEATHER}</tool_call>", "I look.", ["weather"]),
    "two": (
        f"<tool_call>{WEATHER}</tool_call>\n<tool_call>\n{TIME}\n</tool_call>\n",
        "\n",
        ["weather", "time"],
    ),
    "not closed": (f"<tool_call>{WEATHER}", "", ["weather"]),
    "without arguments": ('<tool_call>{"name": "time"}</tool_call>', "", ["time"]),
    "llama": (f"  {LLAMA}", "", ["weather"]),
    "llama, two": (f"{LLAMA}; {LLAMA}", "", ["weather", "weather"]),
    "llama, tag": (f"<|python_tag|>{LLAMA}", "", ["weather"]),
    "python": ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    "object in a text": (f"See {LLAMA}", f"See {LLAMA}", []),
    "another function": (f"<tool_call>{WEATHER.replace('w', 'f')}</tool_call> b", None, []),
    "no JSON": ("<tool_call>weather(</tool_call> < b", None, []),
    "plain object": ('{"name": "weather"} ', None, []),
    "cut off": ('{"name": "weather", "parameters": {"ci', None, []),
    "deep": ('{"name": ' + "[" * 20_000, None, []),
    "text": ("a < b <tool", None, []),
}


@pytest.mark.parametrize("name", CASES)
def test_calls_and_text_are_separated_in_any_pieces(name: str) -> None:
    text, expected, calls = CASES[name]
    random = Random(0)
    for size in (1, 3, 9, 10**6):
        parser = ToolCallParser({"weather", "time"})
        texts, found, left = [], [], text
        while left and (size > 1 or len(text) < 1000):
            count = random.randint(1, size)
            piece, left = left[:count], left[count:]
            new_text, new_calls = parser.push(piece)
            texts.append(new_text)
            found += new_calls
        new_text, new_calls = parser.push(left, is_end=True)
        assert "".join([*texts, new_text]) == (text if expected is None else expected)
        assert [call.name for call in [*found, *new_calls]] == calls
        for call in found:
            assert json.loads(call.arguments) in ({"city": "Köln <a>"}, {})


def test_further_calls_are_left_out() -> None:
    parser = ToolCallParser({"time"}, most=1)
    text, calls = parser.push(f"<tool_call>{TIME}</tool_call>" * 2, is_end=True)
    assert text == ""
    assert len(calls) == 1
