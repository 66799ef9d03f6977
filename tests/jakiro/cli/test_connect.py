"""`jakiro connect`: texts and chats whose target is on a server, and provisional text."""

import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.bad_network import LOST, PASSED, bad_network
from helpers.commands import exit_code
from helpers.serving import Running, running, tiny_decoder

from inference import SpeculativeDecoder
from jakiro.cli.connect import ProvisionalDisplay

KEY = "the key of the server"
SIZE = os.terminal_size((10, 6))


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return tiny_decoder()


@pytest.fixture(scope="module")
def server(decoder: SpeculativeDecoder) -> Iterator[Running]:
    with running(decoder, remote_sessions=2, api_keys=(KEY,)) as found:
        yield found


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAKIRO_API_KEY", KEY)


def _chat(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [
        {"role": roles[number % 2], "content": content} for number, content in enumerate(contents)
    ]


def test_a_prompt_is_answered(
    server: Running, decoder: SpeculativeDecoder, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--temperature", "0", "--max-new-tokens", "12", "--stats"]
    assert exit_code("connect", server.url, "some words", *words) == 0
    printed = capsys.readouterr()
    expected = decoder.generate(_chat("some words"), temperature=0, max_new_tokens=12)
    assert printed.out == f"{expected.text}\n"
    assert "requests (0 of them repeated)" in printed.err


def test_a_text_from_standard_input_is_continued(
    server: Running,
    decoder: SpeculativeDecoder,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"some words\n")))
    words = ["--raw", "--drafter", "none", "--temperature", "0.9", "--seed", "3"]
    assert exit_code("connect", server.url, "-", *words, "--max-new-tokens", "9") == 0
    expected = decoder.generate("some words", temperature=0.9, seed=3, max_new_tokens=9)
    assert capsys.readouterr().out == f"{expected.text}\n"


def test_lines_are_messages_of_a_chat(
    server: Running,
    decoder: SpeculativeDecoder,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\nand now\n"))
    assert exit_code("connect", server.url, "--temperature", "0", "--max-new-tokens", "6") == 0
    options = {"temperature": 0, "max_new_tokens": 6}
    first = decoder.generate(_chat("hello"), **options).text
    second = decoder.generate(_chat("hello", first or "", "and now"), **options).text
    assert capsys.readouterr().out == f"{first}\n{second}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x", "--drafter", "some/folder"], "cannot draft on this machine"),
        (["x", "--memory", "int8"], "only for a trained drafter"),
        (["--raw"], "only a chat has messages"),
        (["x", "--max-new-tokens", "9999"], "longer than a sequence may be"),
    ],
)
def test_what_cannot_be_used_is_named(
    server: Running, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert exit_code("connect", server.url, *words) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def roomy(decoder: SpeculativeDecoder) -> Iterator[Running]:
    """A server for clients that cannot end their sessions."""
    with running(decoder, remote_sessions=2, api_keys=(KEY,)) as found:
        yield found


def test_a_text_that_was_stopped_is_written_again_with_its_seed(
    roomy: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["some words", "--temperature", "0.9", "--max-new-tokens", "40"]
    stop = ["--offline", "stop", "--patience", "0.2"]
    with bad_network(roomy.root, lambda number, _: PASSED if number < 6 else LOST) as network:
        assert exit_code("connect", network.url, *words, *stop) == 2
    stopped = capsys.readouterr()
    found = re.search(
        r"the text was stopped after (\d+) verified tokens; to get all of it, run the same command "
        r"with --seed (\d+)\nerror: cannot reach the server",
        stopped.err,
    )
    assert found is not None
    assert 5 <= int(found[1]) < 40
    assert stopped.out.endswith("\n")
    assert exit_code("connect", roomy.url, *words, "--seed", found[2], *stop) == 0
    whole = capsys.readouterr()
    assert whole.out.startswith(stopped.out[:-1])
    assert len(whole.out) > len(stopped.out)
    assert "stopped" not in whole.err


@pytest.mark.slow
def test_a_text_goes_on_without_a_connection(
    decoder: SpeculativeDecoder, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target: Any = decoder.target.model
    target.save_pretrained(tmp_path)
    assert decoder.tokenizer is not None
    decoder.tokenizer.save_pretrained(tmp_path)
    capsys.readouterr()  # libraries may write when they are first used

    def schedule(number: int, _path: str) -> str:
        return LOST if 3 <= number < 12 else PASSED

    words = ["--drafter", f"lm={tmp_path}", "--offline", "write", "--dtype", "float32"]
    with (
        running(decoder, remote_sessions=2, api_keys=(KEY,)) as server,
        bad_network(server.root, schedule) as network,
    ):
        options = ["--temperature", "0", "--max-new-tokens", "40"]
        assert exit_code("connect", network.url, "some words", *words, *options) == 0
    printed = capsys.readouterr()
    expected = decoder.generate(_chat("some words"), temperature=0, max_new_tokens=40)
    assert printed.out == f"{expected.text}\n"
    assert "provisional tokens" in printed.err


class Screen:
    """A terminal without scrolling: a grid of characters, and a cursor."""

    def __init__(self) -> None:
        self.rows = [[" "] * SIZE.columns for _ in range(40)]
        self.row = self.column = 0

    def write(self, text: str) -> None:
        """Show a text with the escape sequences that the display uses."""
        for part in re.findall(r"\x1b\[[\d;]*[A-Za-z]|.|\n|\r", text):
            if part.startswith("\x1b"):
                self._move(part[-1], part[2:-1])
            elif part == "\n":
                self.row, self.column = self.row + 1, 0
            elif part == "\r":
                self.column = 0
            else:
                self._put(part)

    def _put(self, char: str) -> None:
        if self.column == SIZE.columns:
            self.row, self.column = self.row + 1, 0
        self.rows[self.row][self.column] = char
        self.column += 1

    def _move(self, command: str, number: str) -> None:
        if command == "A":
            self.row -= int(number)
        elif command == "C":
            self.column += int(number)
        elif command == "J":
            below = [[" "] * SIZE.columns for _ in self.rows[self.row + 1 :]]
            self.rows[self.row + 1 :] = below
            self.rows[self.row][self.column :] = [" "] * (SIZE.columns - self.column)

    @property
    def text(self) -> list[str]:
        """The rows down to the last one with text."""
        lines = ["".join(row).rstrip() for row in self.rows]
        while lines and not lines[-1]:
            lines.pop()
        return lines


def _screen_after(*parts: tuple[str, str]) -> list[str]:
    screen = Screen()
    display = ProvisionalDisplay(screen.write, is_terminal=True, size=SIZE)
    for kind, text in parts:
        getattr(display, kind)(text)
    return screen.text


@pytest.mark.parametrize("before", ["", "ab", "a line\n", "abcdefghij", "abcdefghijk", "x" * 29])
def test_provisional_text_leaves_no_trace(before: str) -> None:
    for guess in ("z", "zzzzzzzz", "z" * 10, "z" * 25, "z\nzz\n", "zz\nz"):
        for after in ("", "yy", "y\nyyyyyyyyyyyy"):
            parts = (("verified", before), ("provisional", guess), ("verified", after))
            assert _screen_after(*parts) == _screen_after(("verified", before + after))


def test_text_that_has_left_the_screen_stays_and_a_new_line_begins() -> None:
    parts = (("verified", "ab"), ("provisional", "z" * 100), ("verified", "cd"))
    first, *_, last = _screen_after(*parts)
    assert (first, last) == ("abzzzzzzzz", "cd")


def test_without_a_terminal_only_verified_text_is_written() -> None:
    written: list[str] = []
    display = ProvisionalDisplay(written.append, is_terminal=False)
    display.verified("ab")
    display.provisional("cd")
    display.verified("ef")
    assert written == ["ab", "ef"]
