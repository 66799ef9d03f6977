"""The command line answers fast and reports every mistake of a caller in one line."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from helpers.commands import exit_code

from jakiro.cli import main
from jakiro.cli.output import say
from jakiro.errors import ConfigError, JakiroError

Demo = Callable[..., None]


def raising(error: BaseException) -> Demo:
    def run_demo(*_: Any, **_options: Any) -> None:
        raise error

    return run_demo


def test_a_mistake_of_the_caller_is_one_line_without_traceback(
    plant_demo: Callable[[Demo], None], capsys: pytest.CaptureFixture[str]
) -> None:
    plant_demo(raising(ConfigError("bad\n  value", expected="good", got="bad", remedy="be good")))
    assert exit_code("demo") == 2
    captured = capsys.readouterr()
    assert captured.err == "error: bad value; expected: good; got: bad; remedy: be good\n"
    assert not captured.out


@pytest.mark.parametrize("words", [("--debug", "demo"), ("demo", "--debug")])
def test_debug_shows_the_traceback_before_the_line(
    words: tuple[str, ...],
    plant_demo: Callable[[Demo], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    plant_demo(raising(JakiroError("bad")))
    assert exit_code(*words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1] == "error: bad"


def test_an_interruption_is_reported_in_one_word(
    plant_demo: Callable[[Demo], None], capsys: pytest.CaptureFixture[str]
) -> None:
    plant_demo(raising(KeyboardInterrupt()))
    assert exit_code("demo") == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_fault_of_the_program_is_not_hidden(plant_demo: Callable[[Demo], None]) -> None:
    plant_demo(raising(ZeroDivisionError("ours")))
    with pytest.raises(ZeroDivisionError):
        main(["demo"])


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("dmeo",), "No such command 'dmeo'"),
        (("--color",), "No such option"),
        (("demo", "--device"), "'--device'"),
        (("demo", "more"), "unexpected extra argument"),
    ],
)
def test_a_malformed_command_is_one_line_with_a_remedy(
    words: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert complaint in line
    assert line.endswith(("; remedy: see `jakiro --help`", "; remedy: see `jakiro demo --help`"))


def test_messages_cannot_control_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    say("the server has\nfailed: \x1b[2Jgone\x9b31m")
    assert capsys.readouterr().err == "the server has failed: [2Jgone31m\n"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have another C library")
def test_the_command_line_starts_again_with_large_pages() -> None:
    code = "import os; print(os.getenv('GLIBC_TUNABLES')); import jakiro.cli as c; c.main()"
    own = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    words = [sys.executable, "-c", code, "--version"]
    printed = subprocess.run(words, env=own, capture_output=True, text=True, check=True).stdout
    *_, setting, version = printed.splitlines()
    assert setting == "glibc.malloc.hugetlb=1"
    assert version.startswith("jakiro ")
