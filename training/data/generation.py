"""Records that the target writes: their settings, and the file that they are written to."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from jakiro.errors import ConfigError
from jakiro.utils.files import ensure_writable_folder, write_atomically
from jakiro.utils.logs import get_logger
from jakiro.utils.settings import Settings

_logger = get_logger(__name__)

KEY_TOKENS = 8  # number of leading tokens in which a record must differ from every other record


class SynthesisSettings(Settings):
    """What is written."""

    conversations: int = Field(ge=1)
    """Number of records in the finished file, including those of earlier runs."""
    kind: Literal["chats", "texts"] = "chats"
    """chats: conversations of a chat model; texts: plain texts of a base model."""
    multi_turn: float = Field(0.3, ge=0, le=1)
    """Share of the conversations that are begun with more than one question in view; some of them
    end earlier."""
    max_turns: int = Field(3, ge=1)
    """Largest number of questions in a conversation."""
    greedy: float = Field(0.5, ge=0, le=1)
    """Share of the conversations that are begun with greedy answers; the others are sampled."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of questions, texts and sampled answers."""
    top_p: float = Field(0.99, gt=0, le=1)
    """Sample from the most likely tokens with this total probability (top-p); the other sampling
    options are those of the target's generation config."""
    max_question_tokens: int = Field(256, ge=KEY_TOKENS)
    """Largest number of tokens in a question; longer questions are dropped."""
    max_new_tokens: int = Field(512, ge=1)
    """Largest number of tokens in an answer or a text."""
    seed: int = Field(0, ge=0)
    """The same seed gives the same records: the random numbers for a record depend only on the seed
    and on the number of the record."""
    batch_size: int = Field(16, ge=1)
    """Number of records generated together, which affects only speed and memory use."""


class RegenerationSettings(Settings):
    """Answers."""

    temperature: float = Field(0.0, ge=0)
    """Sampling temperature, 0 for greedy decoding; the other sampling options are those of the
    target's generation config."""
    max_new_tokens: int = Field(512, ge=1)
    """Largest number of tokens in an answer."""
    prompt_tokens: int = Field(64, ge=1)
    """Largest number of tokens at the start of a plain text to use as its prompt."""
    seed: int = Field(0, ge=0)
    """The same seed gives the same answers: they depend only on the seed, the record and the
    chat turn."""
    batch_size: int = Field(8, ge=1)
    """Number of records answered together, which affects only speed and memory use."""
    skip_bad_records: bool = False
    """Leave out unusable records and report how many; by default, they are errors."""


class OutputFile:
    """A JSONL file of generated records, each with its number (key `record`).

    Next to this file, another file whose name ends in `.settings` contains the settings with which
    the records were generated, so that a later run with the same settings can continue the file. A
    hidden file whose name ends in `.lock` stays after the first run.

    Attributes:
        last_record: number of the last record in the file, from 1; 0 if the file has no records.
    """

    def __init__(self, path: Path) -> None:
        if path.suffix != ".jsonl":
            raise ConfigError(f"the name of the output file {path} does not end in .jsonl")
        ensure_writable_folder(path.absolute().parent)
        self.path = path
        self.num_records = 0
        self.last_record = 0

    @contextmanager
    def claim(self, fingerprint: Mapping[str, Any]) -> Iterator[None]:
        """Lock the file, check its settings, and find its last complete record."""
        from filelock import FileLock, Timeout  # every command reads the settings above

        # The file of the lock stays: after its removal, two processes could lock two files.
        try:
            with FileLock(self.path.with_name(f".{self.path.name}.lock"), timeout=0):
                self._check_or_store(fingerprint)
                self._find_end()
                yield
        except Timeout as error:
            raise ConfigError(f"another process is writing to {self.path}") from error

    @contextmanager
    def kept_when_interrupted(self) -> Iterator[None]:
        """After Ctrl-C, log how many records the file has and how to continue it."""
        try:
            yield
        except KeyboardInterrupt:
            _logger.info(
                "%s records are in %s; the same command continues with the next",
                f"{self.num_records:,}",
                self.path,
            )
            raise

    def records(self) -> Iterator[dict[str, Any]]:
        if self.path.exists():
            with self.path.open("rb") as file:
                yield from map(json.loads, file)

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record and flush it to the disk."""
        # Values such as dates, which other formats have but JSON has not, become strings.
        line = json.dumps(record, default=str) + "\n"
        with self.path.open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        self.num_records += 1

    def _check_or_store(self, fingerprint: Mapping[str, Any]) -> None:
        settings = self.path.with_name(f"{self.path.name}.settings")
        if not self.path.exists() or self.path.stat().st_size == 0:
            write_atomically(settings, json.dumps(fingerprint, indent=1))
            return
        if not settings.exists():
            raise ConfigError(
                f"{self.path} was not written by this command", remedy="choose another file"
            )
        stored = json.loads(settings.read_bytes())
        for name, value in fingerprint.items():
            if stored.get(name) != value:
                raise ConfigError(
                    f"{self.path} was made with other settings ({name} differs)",
                    expected=stored.get(name),
                    got=value,
                    remedy="choose another file, or run again with the same settings",
                )

    def _find_end(self) -> None:
        """Count the records, and cut off a line that an interruption left unfinished."""
        last, end, self.num_records = b"", 0, 0
        if self.path.exists():
            with self.path.open("r+b") as file:
                for line in file:
                    if line.endswith(b"\n"):
                        last, end, self.num_records = line, end + len(line), self.num_records + 1
                file.truncate(end)
        self.last_record = int(json.loads(last)["record"]) if last else 0
