"""The demo's text: the Python source of the standard library that this interpreter runs on."""

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from jakiro.errors import DataError
from jakiro.files import fingerprint

Split = Literal["train", "dev", "test"]

# Percent of the files, by a hash of their path; the rest trains.
_PERCENT_DEV, _PERCENT_TEST = 5, 5

# Folders that are not the library's own code: third-party packages, generated tables, and the test
# suites, which some distributions strip: without them the corpus is the same everywhere.
_FOREIGN = frozenset(
    {
        *("site-packages", "dist-packages", "__pycache__", "__phello__"),
        *("encodings", "pydoc_data"),
        *("test", "tests", "idle_test"),
    }
)
# Records of how and where the interpreter was built.
_BUILD_RECORDS = ("config-", "_sysconfigdata")


@dataclass(frozen=True)
class SourceFile:
    """One file: its path below the library's root, with `/` on every system, and its text."""

    path: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Files in the order of their paths, split by a hash of the path alone.

    Attributes:
        train: what models may learn from.
        dev: held out, to choose settings on.
        test: held out, to report on.
        fingerprint: SHA-256 over all paths and texts.
    """

    train: tuple[SourceFile, ...]
    dev: tuple[SourceFile, ...]
    test: tuple[SourceFile, ...]
    fingerprint: str

    def files(self, split: Split) -> tuple[SourceFile, ...]:
        """Return the files of one split."""
        return {"train": self.train, "dev": self.dev, "test": self.test}[split]


def load_corpus(root: Path | None = None, *, min_characters: int = 1_000_000) -> Corpus:
    """Read the library's Python files, without test suites, tables, and third-party packages.

    Files that are empty or no UTF-8 are left out.

    Args:
        root: the library's folder; by default that of the running interpreter.
        min_characters: below this much text, a corpus is taken for an incomplete installation.

    Raises:
        DataError: there is too little source text, as in a zipped, frozen, or stripped Python.
    """
    folder = root or Path(sysconfig.get_paths()["stdlib"])
    files = list(_read_files(folder))
    by_split = {
        split: tuple(file for file in files if split_of(file.path) == split)
        for split in get_args(Split)
    }
    num_characters = sum(len(file.text) for file in files)
    if num_characters < min_characters or not all(by_split.values()):
        raise DataError(
            f"too little Python source in {folder}",
            expected=f"at least {min_characters:,} characters, with files for each split",
            got=f"{num_characters:,} characters in {len(files)} files",
            remedy="use a Python installed with its standard library as .py files",
        )
    identity = fingerprint([[file.path, file.text] for file in files])
    return Corpus(**by_split, fingerprint=identity)


def split_of(path: str) -> Split:
    """Return the split of the file at this relative path; its text does not matter."""
    percent = int.from_bytes(hashlib.sha1(path.encode()).digest()[:8]) % 100
    if percent < _PERCENT_TEST:
        return "test"
    return "dev" if percent < _PERCENT_TEST + _PERCENT_DEV else "train"


def _read_files(folder: Path) -> Iterator[SourceFile]:
    relative = (path.relative_to(folder) for path in folder.rglob("*.py"))
    for path in sorted(filter(_is_library_code, relative), key=Path.as_posix):
        text = _read_text(folder / path)
        if text and not text.isspace():
            yield SourceFile(path.as_posix(), text)


def _is_library_code(path: Path) -> bool:
    return _FOREIGN.isdisjoint(path.parts[:-1]) and not path.parts[0].startswith(_BUILD_RECORDS)


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None  # deliberately odd encodings exist in the library; they are no loss
