"""Options that come from the fields of settings classes."""

from pathlib import Path
from typing import Annotated, Literal

import pytest
import typer
from pydantic import Field, PositiveInt

from jakiro.cli.options import with_options
from jakiro.errors import ConfigError
from jakiro.utils.settings import Settings


class Example(Settings):
    """Settings of an example."""

    count: PositiveInt
    """Number of things."""
    mode: Literal["slow", "fast"] = "slow"
    """How it is done."""
    threads: int | Literal["auto"] = "auto"
    """Number of threads."""
    factor: float | None = Field(None, gt=0)
    """A factor."""
    folder: Path = Path("here")
    """Where it is done."""
    is_shown: bool = True
    """Show it."""
    quiet: bool = False
    """Say nothing."""
    proxies: tuple[str, ...] = ("a", "b")
    """A proxy."""
    secret: str = Field(default_factory=lambda: "hidden")


def run(*words: str) -> tuple[str, Example]:
    """Run a command with the settings as options, and return what it receives."""
    received = []

    @with_options
    def command(
        *, name: Annotated[str, typer.Argument()], more: int = 1, settings: Example
    ) -> None:
        assert more
        received.append((name, settings))

    app = typer.Typer()
    app.command()(command)
    app(list(words), standalone_mode=False)
    return received[0]


def test_fields_without_an_option_keep_their_defaults() -> None:
    name, settings = run("me", "--count", "3")
    assert name == "me"
    assert settings == Example(count=3)
    assert settings.model_fields_set == {"count"}


def test_options_have_the_types_of_their_fields() -> None:
    words = ["--count", "3", "--mode", "fast", "--threads", "4", "--factor", "0.5", "--quiet"]
    words += ["--folder", "there", "--no-is-shown", "--proxy", "x", "--proxy", "y"]
    assert run("me", *words)[1] == Example(
        count=3,
        mode="fast",
        threads=4,
        factor=0.5,
        quiet=True,
        folder=Path("there"),
        is_shown=False,
        proxies=("x", "y"),
    )


@pytest.mark.parametrize(
    "words",
    [
        ("--count", "0"),
        ("--count", "x"),
        ("--mode", "other"),
        ("--factor", "0"),
        ("--threads", "x"),
    ],
)
def test_an_unusable_value_is_named_with_its_option(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=words[0]):
        run("me", "--count", "1", *words)


def test_help_names_values_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    run_with_help = pytest.raises(IndexError)  # the command itself does not run
    with run_with_help:
        run("--help")
    shown = " ".join(capsys.readouterr().out.split())
    for text in ("Settings of an example", "slow|fast", "N|auto", "[required]", "May be repeated."):
        assert text in shown
    assert "secret" not in shown
