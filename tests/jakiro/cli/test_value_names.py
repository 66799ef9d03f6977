"""Help texts name the values of options, and show no names of Python types."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.commands import exit_code
from typer.main import get_command

from jakiro.cli import app


def _commands(command: Any, *words: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of a command and of all commands below it."""
    yield words
    for name, below in getattr(command, "commands", {}).items():
        yield from _commands(below, *words, name)


@pytest.mark.parametrize("words", [*_commands(get_command(app))], ids=" ".join)
def test_help_names_values_and_no_types(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert exit_code(*words, "--help") == 0
    shown = capsys.readouterr().out
    assert "--help" in shown
    assert not re.search(r"<[^>=]*>", shown)


def test_values_are_named_after_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("bench", "--help") == 0
    shown = capsys.readouterr().out
    for option, value in {"num-prompts": "N", "temperature": "T", "baseline": "BASELINE"}.items():
        assert re.search(rf"--{option} +{value} ", shown)
    assert re.search(r"--keep-state   +[A-Z][a-z]", shown)  # a flag, followed by its description
