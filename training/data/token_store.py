"""The token store: tokens of all documents, cached on disk and mapped into memory."""

import hashlib
import shutil
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt
from filelock import FileLock
from platformdirs import user_cache_path
from transformers import PreTrainedTokenizerBase

from jakiro.errors import DataError, ResourceError
from jakiro.target.record import template_fingerprint, tokenizer_fingerprint
from jakiro.utils.files import ensure_writable_folder, fingerprint, written_folder
from jakiro.utils.settings import Settings
from jakiro.utils.wording import counted
from training.data.documents import Document, check_vocabulary, encode_records
from training.data.sources import Intake, Record, Source, find_sources, read_all

# This number is part of the fingerprint. Raise it whenever the code changes in such a way that the
# same records are encoded differently.
_REVISION = 4

# Tokenizers with the same vocabulary may encode this text differently, and end texts differently.
_PROBE = "Hello,  wörld: it's 2024!\n\n\tdef f(x_1): return [x_1 ** 2]  # ½ € 中文 🙂 </s>"


class ReadCounts(Settings):
    """Counts of the data that was read.

    Attributes:
        dropped: number of documents that were dropped because, with fewer than two tokens, they
            contain nothing to predict.
        unlearned: number of turns with the weight 0, from which nothing is learned.
        documents: number of documents kept; a conversation may have one for each answer.
    """

    records: int
    skipped: int
    unlearned: int = 0
    dropped: int
    documents: int
    tokens: int
    responses: int
    highest_id: int

    def lines(self) -> Iterator[str]:
        """Yield log lines that report the counts."""
        dropped = f", {self.dropped:,} with fewer than two tokens dropped" if self.dropped else ""
        yield (
            f"{counted(self.records, 'record')} read, {self.skipped:,} skipped; "
            f"{counted(self.documents, 'document')} kept{dropped}"
        )
        if self.unlearned:
            yield f"{counted(self.unlearned, 'turn')} with the weight 0, which is not learned"
        share = f"{self.responses / self.tokens:.0%}"
        yield f"{counted(self.tokens, 'token')}, {self.responses:,} of them in responses ({share})"


@dataclass(frozen=True)
class TokenStore:
    """The tokens of all documents, one document after another.

    Attributes:
        starts: index of the first token of each document, followed by the total number of tokens.
        counts: counts of the data that was read; None for documents without a source.
        names: names of the sources.
        records: for each document, the index of its source, from 0, and the line (JSONL) or index
            (other sources) of its record in that source, from 1, [documents, 2]. Several documents
            may come from one conversation. None for documents without a source.
    """

    token_ids: npt.NDArray[np.int32]
    is_response: npt.NDArray[np.bool_]
    starts: npt.NDArray[np.int64]
    fingerprint: str
    counts: ReadCounts | None = None
    names: tuple[str, ...] = ()
    records: npt.NDArray[np.int64] | None = None

    @property
    def num_documents(self) -> int:
        """The number of documents."""
        return len(self.starts) - 1

    @cached_property
    def first_documents(self) -> npt.NDArray[np.int64]:
        """The index of the first document of each record; its other documents follow."""
        if self.records is None:
            return np.arange(self.num_documents)
        is_other = (self.records[1:] != self.records[:-1]).any(axis=1)
        return np.flatnonzero(np.concatenate([[True], is_other]))

    @cached_property
    def is_text(self) -> npt.NDArray[np.bool_]:
        """Whether each document is a text, which means that all of its tokens are in a response."""
        return np.logical_and.reduceat(self.is_response, self.starts[:-1])

    def hash_of(self, index: SupportsIndex) -> int:
        """Return a hash of a document's tokens."""
        digest = hashlib.sha256(self.document(index).token_ids.tobytes()).digest()
        return int.from_bytes(digest[:8], "big")

    def describe(self, documents: Sequence[int]) -> str:
        """Return the locations of documents in the data, such as `chats.jsonl:12, 15`.

        Documents without a source are described by their numbers, from 1.
        """
        if self.records is None:
            return f"documents {', '.join(str(document + 1) for document in documents)}"
        records = dict.fromkeys(tuple(self.records[document].tolist()) for document in documents)
        return ", ".join(
            f"{self.names[source]}:{', '.join(str(number) for _, number in same)}"
            for source, same in groupby(records, key=lambda record: record[0])
        )

    def document(self, index: SupportsIndex) -> Document:
        """Return the tokens of one document."""
        begin, end = self.starts[int(index) : int(index) + 2]
        return Document(self.token_ids[begin:end], self.is_response[begin:end])


def open_tokens(
    paths: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    cache_folder: Path | None = None,
    *,
    skip_bad_records: bool = False,
    vocab_size: int | None = None,
) -> TokenStore:
    """Return the token store of the data, from the cache or by reading the data.

    If several processes call this function, one of them reads the data and the others wait.
    """
    cache = ensure_writable_folder(cache_folder or user_cache_path("jakiro") / "tokens")
    sources = find_sources(paths)
    key = fingerprint(
        _REVISION,
        [source.fingerprint() for source in sources],
        tokenizer_fingerprint(tokenizer),
        template_fingerprint(tokenizer),
        _encoding(tokenizer),
        ["skip", vocab_size] if skip_bad_records else None,
    )
    home = cache / key[:32]
    with FileLock(cache / f".{home.name}.lock"):
        store = _cached(home, key, sources)
        if store is None:
            intake = Intake(skip_bad_records)
            records = encode_records(tokenizer, read_all(sources, intake), intake, vocab_size)
            write_tokens(home, records, intake)
            store = _map(home, key, sources)
    assert store.counts is not None
    # The tokens may have been stored for another target.
    check_vocabulary(store.counts.highest_id, "the data", vocab_size)
    return store


def _encoding(tokenizer: PreTrainedTokenizerBase) -> list[object]:
    """Return the end of texts, and how the tokenizer encodes the probe."""
    try:
        probes = [tokenizer(_PROBE, add_special_tokens=own).input_ids for own in (True, False)]
    except Exception:  # noqa: BLE001 - some tokenizers only know the characters of their data
        probes = []
    return [tokenizer.eos_token_id, *probes]


def write_tokens(
    home: Path, records: Iterable[tuple[Record, Sequence[Document]]], intake: Intake
) -> None:
    """Write all files that a `TokenStore` maps into memory; an error leaves no new files behind."""
    for left in home.parent.glob(f".{home.name}.*.partial"):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    try:
        with written_folder(home) as partial:
            partial.mkdir()
            _write(partial, records, intake)
            shutil.rmtree(home, ignore_errors=True)
    except OSError as error:
        raise ResourceError(
            f"cannot write tokens to {home}",
            got=error.strerror or error,
            remedy="free disk space, or set data.cache_folder to a folder on another disk",
        ) from error


def _write(
    folder: Path, records: Iterable[tuple[Record, Sequence[Document]]], intake: Intake
) -> None:
    starts, locations = array("q", [0]), array("q")
    num_responses, num_dropped, highest_id = 0, 0, 0
    with (folder / "token_ids").open("wb") as ids, (folder / "is_response").open("wb") as masks:
        pairs = ((record, document) for record, documents in records for document in documents)
        for record, (token_ids, is_response) in pairs:
            if len(token_ids) < 2:  # there is nothing to predict
                num_dropped += 1
                continue
            starts.append(starts[-1] + len(token_ids))
            locations.extend((record.source, record.number))
            num_responses += int(is_response.sum())
            highest_id = max(highest_id, int(token_ids.max()))
            ids.write(token_ids.tobytes())
            masks.write(is_response.tobytes())
    counts = ReadCounts(
        records=intake.num_records,
        skipped=intake.num_skipped,
        unlearned=intake.num_unlearned,
        dropped=num_dropped,
        documents=len(starts) - 1,
        tokens=starts[-1],
        responses=num_responses,
        highest_id=highest_id,
    )
    if num_responses == 0:
        raise DataError(
            "the data contains nothing to learn from",
            expected="documents with response tokens",
            got=f"{counted(counts.documents, 'document')} without response tokens, "
            f"{counted(counts.skipped, 'record')} skipped",
        )
    _save_array(folder / "starts.npy", np.array(starts, np.int64))
    _save_array(folder / "locations.npy", np.array(locations, np.int64).reshape(-1, 2))
    (folder / "counts.json").write_text(counts.model_dump_json())


def _save_array(path: Path, content: npt.NDArray[Any]) -> None:
    # np.save does not notice if only part of a file is written, so save the array to memory first.
    stream = BytesIO()
    np.save(stream, content)
    path.write_bytes(stream.getvalue())


def _cached(home: Path, key: str, sources: Sequence[Source]) -> TokenStore | None:
    """Return the store in a folder; None if a file is missing, or does not have its full size."""
    try:
        return _map(home, key, sources)
    except (EOFError, OSError, ValueError):
        return None


def _map(home: Path, key: str, sources: Sequence[Source]) -> TokenStore:
    counts = ReadCounts.model_validate_json((home / "counts.json").read_bytes())
    store = TokenStore(
        token_ids=np.memmap(home / "token_ids", np.int32, mode="r"),
        is_response=np.memmap(home / "is_response", np.bool_, mode="r"),
        starts=np.load(home / "starts.npy", mmap_mode="r"),
        fingerprint=key,
        counts=counts,
        names=tuple(source.name for source in sources),
        records=np.load(home / "locations.npy", mmap_mode="r"),
    )
    assert store.records is not None
    lengths = (len(store.token_ids), len(store.is_response), store.num_documents)
    if lengths != (counts.tokens, counts.tokens, counts.documents) or (
        len(store.records) != counts.documents or store.starts[-1] != counts.tokens
    ):
        raise ValueError(f"the tokens in {home} are incomplete")
    return store
