"""Messages on standard error, and files that receive results."""

from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile

import typer

from jakiro.errors import ConfigError, ResourceError

STANDARD_OUTPUT = Path("-")
# Control characters other than tabs and newlines, which could change the state of a terminal.
UNSAFE = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


def say(message: str) -> None:
    """Print a message as one line to standard error, without control characters.

    A message may contain text from another machine.
    """
    typer.echo(" ".join(message.split()).translate(UNSAFE), err=True)


def writer(
    path: Path | None,
    option: str = "--json",
    content: str = "the measured values",
    *,
    standard_output: bool = False,
) -> Callable[[str], None]:
    """Return a function that writes a text to a new file, after checking the path.

    The check comes before long work. If the file cannot be written afterwards, or the user
    interrupts the program, the text is kept in a temporary file, which a message names.

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

    def write(text: str) -> None:
        try:
            write_atomically(path, text)
        except OSError as error:
            raise ResourceError(
                f"cannot write {content} to {path}",
                got=error.strerror or error,
                remedy=_kept(content, text, path.suffix),
            ) from error
        except KeyboardInterrupt:
            if not path.exists():  # otherwise the file is complete
                say(f"interrupted before {path} was written; {_kept(content, text, path.suffix)}")
            raise

    return write


def _kept(content: str, text: str, suffix: str) -> str:
    """Write a text to a temporary file, and return where it is now."""
    with NamedTemporaryFile("w", suffix=suffix, delete=False, encoding="utf-8") as file:
        file.write(text)
    return f"{content} are in {file.name}; copy them to another place"
