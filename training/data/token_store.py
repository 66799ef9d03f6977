"""The token store: tokens of all documents, cached on disk and mapped into memory."""

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, SupportsIndex

import numpy as np
import numpy.typing as npt
from filelock import FileLock
from platformdirs import user_cache_path
from rich.text import Text
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from transformers import PreTrainedTokenizerBase

from jakiro.errors import DataError
from jakiro.target.record import template_fingerprint, tokenizer_fingerprint
from jakiro.utils.files import ensure_writable_folder, fingerprint, publish
from jakiro.utils.settings import Settings
from jakiro.utils.wording import counted
from training.data.documents import Document, check_vocabulary, encode_records
from training.data.sources import Intake, Record, Source, find_sources, read_all

# This number is part of the fingerprint. Raise it whenever the code changes in such a way that the
# same records are encoded differently.
_REVISION = 4
SHOWN = 600  # largest number of tokens of a document that a preview shows

# Tokenizers with the same vocabulary may encode this text differently, and end texts differently.
_PROBE = "Hello,  wörld: it's 2024!\n\n\tdef f(x_1): return [x_1 ** 2]  # ½ € 中文 🙂 </s>"


class ReadCounts(Settings):
    """Counts of the data that was read."""

    records: int
    skipped: int
    unlearned: int = 0
    dropped: int
    documents: int
    tokens: int
    responses: int
    highest_id: int

    def lines(self) -> Iterator[str]:
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
        digest = hashlib.sha256(self.document(index).token_ids.tobytes()).digest()
        return int.from_bytes(digest[:8], "big")

    def location(self, index: int) -> str:
        """Return the location of a document's record in the data, such as `chats.jsonl:12`."""
        assert self.records is not None, "documents of `open_tokens` have a source"
        source, number = self.records[index].tolist()
        return f"{self.names[source]}:{number}"

    def document(self, index: SupportsIndex) -> Document:
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
    path = cache / f"{key[:32]}.safetensors"
    with FileLock(cache / f".{path.stem}.lock"):
        store = _map(path, key, sources)
        if store is None:
            intake = Intake(skip_bad_records)
            records = encode_records(tokenizer, read_all(sources, intake), intake, vocab_size)
            write_tokens(path, records, intake)
            store = _map(path, key, sources)
    assert store is not None
    assert store.counts is not None
    # The tokens may have been stored for another target.
    check_vocabulary(store.counts.highest_id, "the data", vocab_size)
    return store


def _encoding(tokenizer: PreTrainedTokenizerBase) -> list[object]:
    """Return the end of texts, and how the tokenizer encodes the probe."""
    try:
        probes = [tokenizer(_PROBE, add_special_tokens=adds).input_ids for adds in (True, False)]
    except Exception:  # noqa: BLE001 - some tokenizers only know the characters of their data
        probes = []
    return [tokenizer.eos_token_id, *probes]


def write_tokens(
    path: Path, records: Iterable[tuple[Record, Sequence[Document]]], intake: Intake
) -> None:
    """Write a file that `_map` reads; an error leaves no new file behind."""
    partial, folder = path.with_suffix(".partial"), path.parent
    try:
        # All tokens need not fit into memory: they are on disk, also before the file is written.
        with TemporaryFile(dir=folder) as ids, TemporaryFile(dir=folder) as masks:
            arrays, counts = _write_arrays(ids, masks, records, intake)
            save_file(arrays, partial, {"counts": counts.model_dump_json()})
        publish(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _write_arrays(
    ids: IO[bytes],
    masks: IO[bytes],
    records: Iterable[tuple[Record, Sequence[Document]]],
    intake: Intake,
) -> tuple[dict[str, npt.NDArray[Any]], ReadCounts]:
    """Write the tokens of all documents to two files, and return these, mapped, with the rest."""
    starts, locations = array("q", [0]), array("q")
    num_responses, num_dropped, highest_id = 0, 0, 0
    for record, documents in records:
        for token_ids, is_response in documents:
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
    ids.flush()
    masks.flush()
    arrays = {
        "token_ids": np.memmap(ids, np.int32, mode="r"),
        "is_response": np.memmap(masks, np.bool_, mode="r"),
        "starts": np.array(starts, np.int64),
        "locations": np.array(locations, np.int64).reshape(-1, 2),
    }
    return arrays, counts


def _map(path: Path, key: str, sources: Sequence[Source]) -> TokenStore | None:
    """Return the tokens in a file, mapped into memory; None if it is missing or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
            counts = ReadCounts.model_validate_json(file.metadata()["counts"])
        return TokenStore(
            token_ids=arrays["token_ids"],
            is_response=arrays["is_response"],
            starts=arrays["starts"],
            fingerprint=key,
            counts=counts,
            names=tuple(source.name for source in sources),
            records=arrays["locations"],
        )
    except (OSError, SafetensorError, TypeError, KeyError, ValueError):
        return None


def preview(store: TokenStore, tokenizer: PreTrainedTokenizerBase, count: int) -> list[Text]:
    """Return colored previews of documents that are spread evenly over the data.

    For terminals without colors, responses are also enclosed in ⟦ and ⟧.
    """
    indices = np.linspace(0, store.num_documents - 1, min(count, store.num_documents))
    return [_show(store, tokenizer, int(index)) for index in indices]


def _show(store: TokenStore, tokenizer: PreTrainedTokenizerBase, index: int) -> Text:
    ids, mask = store.document(index)
    title = f"document {index + 1:,} of {store.num_documents:,}, {store.location(index)}: "
    counts = f"{len(ids):,} tokens, {int(mask.sum()):,} in responses, marked with ⟦ and ⟧\n"
    text = Text.assemble((title + counts, "bold"))
    shown, mask = ids[:SHOWN], mask[:SHOWN]
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(shown)]
    for begin, end in pairwise(borders):
        part = str(tokenizer.decode(shown[begin:end].tolist()))
        if mask[begin]:
            text.append(f"⟦{part}⟧", style="bold green")
        else:
            text.append(part, style="dim")
    if len(ids) > SHOWN:
        text.append(f" ... {len(ids) - SHOWN:,} more tokens", style="italic")
    return text
