"""What commands tell, and where they store their figures."""

from collections.abc import Callable
from pathlib import Path

import typer

EXIT_CODE_INTERRUPTED = 130  # typer turns an interruption into this code


def say(message: str) -> None:
    """Print one line to standard error, whatever a parser quoted."""
    typer.echo(" ".join(message.split()), err=True)


def writer(
    path: Path | None, option: str = "--json", content: str = "the figures"
) -> Callable[[str], None]:
    """Return what stores a text; a file that is there is refused before any work.

    Args:
        path: the new file; None to store nothing.
        option: that named the path.
        content: what it will hold, as errors call it.

    Raises:
        ConfigError: the file exists, or its folder does not.
    """
    from jakiro.utils.files import ensure_new_file, ensure_writable_folder, write_atomically

    if path is None:
        return lambda _text: None
    ensure_new_file(path, content, option)
    ensure_writable_folder(path.absolute().parent)
    return lambda text: write_atomically(path, text)
