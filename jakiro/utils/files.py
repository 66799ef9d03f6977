"""Atomic writing of files and folders, checks of output paths, and fingerprints of contents."""

import errno
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jakiro.errors import ConfigError, ResourceError

_NUMBER_IN_TEXT = re.compile(r"\(os error (\d+)\)")
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def explain_failed_access(error: Exception) -> ResourceError | None:
    """Return what to do about a path that is forbidden, or has no room left; None for other errors.

    Errors of safetensors, which is written in Rust, have their number in the text.
    """
    in_text = _NUMBER_IN_TEXT.search(str(error))
    number = error.errno if isinstance(error, OSError) else in_text and int(in_text[1])
    is_forbidden = number in _FORBIDDEN
    if not (is_forbidden or number in _NO_SPACE):
        return None
    return ResourceError(
        f"cannot read or write {getattr(error, 'filename', None) or 'a file'}",
        got=getattr(error, "strerror", None) or error,
        remedy="change its permissions, or choose another path"
        if is_forbidden
        else "free disk space, and run the command again; finished work is kept",
    )


def write_atomically(path: Path, content: bytes | str) -> None:
    """Replace a file atomically, so that a reader finds either the old or the new content."""
    data = content.encode() if isinstance(content, str) else content
    # The replacement is atomic because both paths are on the same file system.
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
    """Rename a finished folder once all its contents are on disk.

    Its files get the permissions of the folder, because only their owner may read the files that
    safetensors writes. The new path is on the same file system, and nothing exists there, or an
    empty folder.
    """
    for path in (*partial.rglob("*"), partial):
        if path.is_file():
            path.chmod(path.parent.stat().st_mode & 0o666)
        _bring_to_disk(path)
    partial.rename(final)
    _bring_to_disk(final.parent)


@contextmanager
def written_folder(folder: Path) -> Iterator[Path]:
    """Yield the temporary path of a folder, which gets its name when it is complete."""
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.partial")
    try:
        yield partial
        publish(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def ensure_new_file(path: Path, content: str, option: str = "--out") -> None:
    """Raise an error if the path of a new file exists already, or if its folder is missing."""
    is_taken = path.exists() or path.is_symlink()  # a link may lead to nothing
    if is_taken or not path.absolute().parent.is_dir():
        raise ConfigError(
            f"cannot write {content} to {path}",
            got="a path that already exists" if is_taken else "no such folder",
            remedy=f"choose another name for {option}",
        )


def fingerprint(*parts: object) -> str:
    """Return a hexadecimal SHA-256 hash, which is the same on every machine for the same parts.

    The order of the keys in a mapping does not affect the hash, and a list has the same hash as a
    tuple.

    Args:
        *parts: bytes or JSON-serializable data; the division into parts affects the hash.
    """
    digest = hashlib.sha256()
    for part in parts:
        kind, data = ("bytes", part) if isinstance(part, bytes) else ("json", _canonical(part))
        digest.update(f"{kind}:{len(data)}:".encode())
        digest.update(data)
    return digest.hexdigest()


def checksum(path: Path) -> str:
    """Return the SHA-256 checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def ensure_writable_folder(path: Path) -> Path:
    """Create a folder if it is missing, and check that files can be written into it."""
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
    """Wait until a file, or a folder's list of entries, has been written to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _canonical(part: object) -> bytes:
    text = json.dumps(part, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode()
