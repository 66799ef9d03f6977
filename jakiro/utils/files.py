"""Files that are never half-written, and names that follow from contents."""

import hashlib
import json
import os
import uuid
from pathlib import Path

from jakiro.errors import ConfigError


def write_atomically(path: Path, content: bytes | str) -> None:
    """Replace the file at `path`, so that a reader sees the old content or the new, never a part.

    Args:
        path: the file; its folder must exist.
        content: the new content; text is encoded as UTF-8.

    Raises:
        OSError: the folder is missing or unwritable, or the disk is full; `path` is unchanged.
    """
    data = content.encode() if isinstance(content, str) else content
    # Same folder, hence same file system: only then is the replacement atomic.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def publish(partial: Path, final: Path) -> None:
    """Give a finished folder its name, after everything in it has reached the disk.

    Args:
        partial: the folder, on the same file system.
        final: its name; there must be nothing yet, or an empty folder.

    Raises:
        OSError: the disk is full, or the name is taken; `partial` is where it was.
    """
    for path in (*partial.rglob("*"), partial):
        _bring_to_disk(path)
    partial.rename(final)
    _bring_to_disk(final.parent)


def ensure_new_file(path: Path, content: str, option: str = "--out") -> None:
    """Refuse to write a file where that would lose another one, or where there is no folder.

    Args:
        path: the file.
        content: what it will hold, as errors call it.
        option: what else to choose another name for.

    Raises:
        ConfigError: the file exists, or its folder does not.
    """
    if path.exists() or not path.absolute().parent.is_dir():
        raise ConfigError(
            f"cannot write {content} to {path}",
            expected="a new file in a folder that is there",
            got="a file that exists" if path.exists() else "no such folder",
            remedy=f"choose another name for {option}",
        )


def fingerprint(*parts: object) -> str:
    """Return a SHA-256 in hexadecimal that is the same for the same parts, on every machine.

    Mappings are compared regardless of their order, lists and tuples as equal.

    Args:
        *parts: bytes, or data that JSON can hold; where one part ends makes a difference.

    Raises:
        TypeError: a part is neither bytes nor data that JSON can hold.
        ValueError: a part holds a number that is not finite.
    """
    digest = hashlib.sha256()
    for part in parts:
        kind, data = ("bytes", part) if isinstance(part, bytes) else ("json", _canonical(part))
        digest.update(f"{kind}:{len(data)}:".encode())
        digest.update(data)
    return digest.hexdigest()


def ensure_writable_folder(path: Path) -> Path:
    """Create the folder if it is missing and prove that files can be written into it.

    Returns:
        The folder's absolute path.

    Raises:
        ConfigError: the folder cannot be created or written to.
    """
    folder = path.expanduser().absolute()
    probe = folder / f".probe.{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"cannot write into the folder {folder}",
            expected="a folder that can be created and written to",
            got=error.strerror or error,
            remedy="choose another folder, or change its permissions",
        ) from error
    return folder


def _bring_to_disk(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, will survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _canonical(part: object) -> bytes:
    text = json.dumps(part, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode()
