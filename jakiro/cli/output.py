"""Messages on standard error, and files that receive results."""

from collections.abc import Callable
from pathlib import Path

import typer


def say(message: str) -> None:
    """Print a message as one line to standard error."""
    typer.echo(" ".join(message.split()), err=True)


def writer(
    path: Path | None, option: str = "--json", content: str = "the measured values"
) -> Callable[[str], None]:
    """Return a function that writes a text to a new file, after checking the path.

    Args:
        path: path of the new file; None to get a function that does nothing.
        option: name of the option that gave the path.
        content: name of the content in error messages.

    Raises:
        ConfigError: the file exists, or its folder does not exist or cannot be written to.
    """
    from jakiro.utils.files import ensure_new_file, ensure_writable_folder, write_atomically

    if path is None:
        return lambda _text: None
    ensure_new_file(path, content, option)
    ensure_writable_folder(path.absolute().parent)
    return lambda text: write_atomically(path, text)
