"""What commands tell, and where they store their figures."""

from collections.abc import Callable
from pathlib import Path

import typer

from jakiro.errors import ConfigError

EXIT_CODE_INTERRUPTED = 130  # typer turns an interruption into this code


def say(message: str) -> None:
    """Print one line to standard error, whatever a parser quoted."""
    typer.echo(" ".join(message.split()), err=True)


def writer(path: Path | None, option: str = "--json") -> Callable[[str], None]:
    """Return what stores a text; a file that is there is refused before any work.

    Raises:
        ConfigError: the file exists, or its folder does not.
    """
    from jakiro.files import ensure_writable_folder, write_atomically

    if path is None:
        return lambda _text: None
    if path.exists() or not path.absolute().parent.is_dir():
        raise ConfigError(
            f"cannot store the figures in {path}",
            expected="a new file in a folder that is there",
            got="a file that exists" if path.exists() else "no such folder",
            remedy=f"choose another name for {option}",
        )
    ensure_writable_folder(path.absolute().parent)
    return lambda text: write_atomically(path, text)
