"""Atomic writing of files and folders, and fingerprints of contents."""

import hashlib
import json
import os
import uuid
from pathlib import Path

from jakiro.errors import ConfigError


def write_atomically(path: Path, content: bytes | str) -> None:
    """Replace a file so that a reader sees the old content or the new, never a part.

    Args:
        path: file to replace, in an existing folder.
        content: new content; text is encoded as UTF-8.

    Raises:
        OSError: the folder is missing or not writable, or the disk is full; `path` is unchanged.
    """
    data = content.encode() if isinstance(content, str) else content
    # The replacement is atomic because both names are in one file system.
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
    """Rename a finished folder, after everything in it has reached the disk.

    Args:
        partial: finished folder under its temporary name.
        final: new name on the same file system, unused or that of an empty folder.

    Raises:
        OSError: the disk is full, or the name is taken; `partial` keeps its name.
    """
    for path in (*partial.rglob("*"), partial):
        _bring_to_disk(path)
    partial.rename(final)
    _bring_to_disk(final.parent)


def ensure_new_file(path: Path, content: str, option: str = "--out") -> None:
    """Refuse a path for a new file if a file has it already, or if its folder is missing.

    Args:
        path: path of the new file.
        content: name of the content in error messages.
        option: option that gave the path, for error messages.

    Raises:
        ConfigError: the file exists, or its folder does not.
    """
    if path.exists() or not path.absolute().parent.is_dir():
        raise ConfigError(
            f"cannot write {content} to {path}",
            expected="a new file in an existing folder",
            got="a file that exists" if path.exists() else "no such folder",
            remedy=f"choose another name for {option}",
        )


def fingerprint(*parts: object) -> str:
    """Return a SHA-256 in hexadecimal that is the same for equal parts on every machine.

    The order of mappings does not matter, and lists equal tuples.

    Args:
        *parts: bytes, or data that JSON can hold; the boundaries between parts matter.

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
    """Create a folder if it is missing, and check that files can be written into it.

    Returns:
        The absolute path of the folder.

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
    """Wait until a file, or the list of names in a folder, is safe against a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _canonical(part: object) -> bytes:
    text = json.dumps(part, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode()
