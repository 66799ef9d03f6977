"""Lines from standard input, messages on standard error, and files that receive results."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import typer

from jakiro.errors import ConfigError, PromptError

STANDARD_OUTPUT = Path("-")
_PROMPT = "> "
# Control characters other than tabs and newlines, which could change the state of a terminal.
UNSAFE = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


def say(message: str) -> None:
    """Print a message as one line to standard error, without control characters.

    A message may contain text from another machine.
    """
    typer.echo(" ".join(message.split()).translate(UNSAFE), err=True)


def lines() -> Iterator[str]:
    """Yield the lines of standard input; in a terminal, after a prompt and until Ctrl-D."""
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        with suppress(ImportError):  # some systems lack this module
            import readline  # noqa: F401 - lets users edit lines and recall earlier lines
    while True:
        try:
            yield _line(_PROMPT if is_interactive else "")
        except EOFError:
            if is_interactive:
                say("")  # ends the line of the prompt
            return
        except KeyboardInterrupt:
            if not is_interactive:
                raise
            typer.echo("\nCtrl-D ends the chat", err=True)


def _line(prompt: str) -> str:
    if not sys.stdout.isatty():  # keeps the prompt out of the file with the answers
        typer.echo(prompt, nl=False, err=True)
        prompt = ""
    try:
        return input(prompt)
    except UnicodeDecodeError as error:
        raise PromptError("cannot read a line", expected="UTF-8", got=error) from error


def writer(
    path: Path | None,
    option: str = "--json",
    content: str = "the measured values",
    *,
    standard_output: bool = False,
) -> Callable[[str], None]:
    """Return a function that writes a text to a new file, after checking the path.

    The check comes before long work.

    Args:
        path: path of the new file; None to get a function that does nothing.
        standard_output: whether the path `-` means standard output; if not, it is refused.
    """
    from jakiro.utils.files import ensure_new_file, ensure_writable_folder, write_atomically

    if path is None:
        return lambda _text: None
    if path == STANDARD_OUTPUT and standard_output:
        return lambda text: typer.echo(text, nl=False)
    if path == STANDARD_OUTPUT:
        raise ConfigError(f"{option} cannot write {content} to standard output")
    ensure_new_file(path, content, option)
    ensure_writable_folder(path.absolute().parent)
    return partial(write_atomically, path)


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, after which finished work is kept and shown."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
