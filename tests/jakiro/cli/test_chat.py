"""`jakiro chat`: answers line by line without a terminal; colors and Ctrl-C in a terminal."""

import io
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.commands import exit_code
from helpers.models import tiny_llama
from helpers.templates import family_tokenizer

from inference import SpeculativeDecoder

ANSI = "\x1b["


class Terminal(io.StringIO):
    """A terminal that calls a function before each piece of output."""

    def __init__(self, text: str = "", on_write: Callable[[str], None] | None = None) -> None:
        super().__init__(text)
        self._on_write = on_write or (lambda _: None)

    def isatty(self) -> bool:
        """Return True, as terminals do."""
        return True

    def write(self, text: str) -> int:
        """Call the function, then keep the text."""
        self._on_write(text)
        return super().write(text)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = family_tokenizer("chatml")
    tiny_llama(vocab=len(tokenizer), max_position_embeddings=256).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _terminal_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def _chat(target: Path, *options: str) -> int:
    words = ["chat", "lookup", "--target", str(target), "--max-new-tokens", "40", "--tree", "fixed"]
    return exit_code(*words, *options)


def _answers(target: Path, *questions: str) -> list[str]:
    decoder = SpeculativeDecoder.from_pretrained("lookup", target)
    messages: list[dict[str, str]] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        text = decoder.generate(messages, max_new_tokens=40).text or ""
        messages.append({"role": "assistant", "content": text})
    return [message["content"] for message in messages[1::2]]


def test_without_a_terminal_each_line_is_answered(
    target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("main\n\n/stats\nreturn"))
    assert _chat(target) == 0
    captured = capsys.readouterr()
    assert captured.out == "".join(f"{text}\n" for text in _answers(target, "main", "return"))
    assert "last answer: 40 tokens" in captured.err
    assert "target: " in captured.err


def test_without_a_terminal_a_wrong_command_is_reported_and_left_out(
    target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("/foo\nmain\n"))
    assert _chat(target) == 2
    captured = capsys.readouterr()
    assert "error: there is no command /foo" in captured.err
    assert captured.out == f"{_answers(target, 'main')[0]}\n"


def test_in_a_terminal_drafted_tokens_are_colored(
    target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stdin", Terminal("/help\nmain\n/foo\n/quit\nreturn\n"))
    monkeypatch.setattr("sys.stdout", screen)
    assert _chat(target) == 0
    error = capsys.readouterr().err
    assert "drafts at depth 1, 2" in error
    assert "error: there is no command /foo" in error
    assert "end of the chat" in error
    assert ANSI in screen.getvalue()
    assert screen.getvalue().count("> ") == 4  # the chat ended before the last line


def test_ctrl_c_stops_the_answer_and_not_the_program(
    target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    interruptions = iter([signal.SIGINT])

    def interrupt(text: str) -> None:
        if text.strip() not in ("", ">"):  # the first piece of an answer
            for number in interruptions:
                signal.raise_signal(number)

    screen = Terminal(on_write=interrupt)
    monkeypatch.setattr("sys.stdin", Terminal("main\n/stats\nreturn\n"))
    monkeypatch.setattr("sys.stdout", screen)
    assert _chat(target) == 0
    error = capsys.readouterr().err
    assert "[stopped; the text above stays in the chat]" in error
    assert "last answer: 40 tokens" not in error
    assert "[the answer has reached the limit of 40 tokens" in error  # the second answer
