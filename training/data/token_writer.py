"""Writer of the token cache, which counts records and documents."""

import hashlib
import json
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jakiro.errors import DataError, ResourceError
from jakiro.utils.files import publish, write_atomically
from jakiro.utils.wording import counted
from training.data.counts import ReadCounts
from training.data.documents import Document
from training.data.sources import Intake, Record


def write_tokens(
    home: Path, records: Iterable[tuple[Record, Sequence[Document]]], intake: Intake
) -> None:
    """Write all files that a `TokenStore` maps into memory; an error leaves no new files behind."""
    partial = home.with_name(f".{home.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with _writing(partial):
            partial.mkdir()
        _write(partial, records, intake)
        with _writing(home):
            shutil.rmtree(home, ignore_errors=True)
            publish(partial, home)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def hash_document(document: Document) -> int:
    """Return a hash of a document's tokens."""
    digest = hashlib.sha256(document.token_ids.tobytes()).digest()
    return int.from_bytes(digest[:8], "big")


def _write(
    folder: Path, records: Iterable[tuple[Record, Sequence[Document]]], intake: Intake
) -> None:
    starts, hashes, locations = array("q", [0]), array("Q"), array("q")
    num_responses, num_dropped, highest_id = 0, 0, 0
    with _appending(folder / "token_ids") as add_ids, _appending(folder / "is_response") as add:
        pairs = ((record, document) for record, own in records for document in own)
        for record, document in pairs:
            if len(document.token_ids) < 2:  # there is nothing to predict
                num_dropped += 1
                continue
            starts.append(starts[-1] + len(document.token_ids))
            hashes.append(hash_document(document))
            locations.extend((record.source, record.number))
            num_responses += int(document.is_response.sum())
            highest_id = max(highest_id, int(document.token_ids.max()))
            add_ids(document.token_ids)
            add(document.is_response)
    counts = ReadCounts(
        records=intake.num_records,
        skipped=intake.num_skipped,
        dropped=num_dropped,
        documents=len(hashes),
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
            remedy="add answers of the assistant to the records"
            if counts.documents
            else "correct the records; warnings name them, and so does a run that skips no records",
        )
    _save_array(folder / "starts.npy", np.array(starts, np.int64))
    _save_array(folder / "hashes.npy", np.array(hashes, np.uint64))
    _save_array(folder / "locations.npy", np.array(locations, np.int64).reshape(-1, 2))
    _save(folder / "counts.json", counts.model_dump_json().encode())
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    _save(folder / "sizes.json", json.dumps(sizes).encode())


@contextmanager
def _appending(path: Path) -> Iterator[Callable[[npt.NDArray[Any]], None]]:
    """Yield a function that appends an array to a new file.

    Errors that are raised in the `with` block are passed on unchanged.
    """
    with _writing(path):
        file = path.open("wb")

    def add(part: npt.NDArray[Any]) -> None:
        with _writing(path):
            file.write(part.tobytes())

    try:
        yield add
        with _writing(path):
            file.close()
    finally:
        with suppress(OSError):  # a write error has already been raised
            file.close()


def _save_array(path: Path, content: npt.NDArray[Any]) -> None:
    # np.save does not notice if only part of a file is written, so save the array to memory first.
    stream = BytesIO()
    np.save(stream, content)
    _save(path, stream.getvalue())


def _save(path: Path, content: bytes) -> None:
    with _writing(path, len(content)):
        write_atomically(path, content)


@contextmanager
def _writing(path: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Turn disk errors into errors that suggest a remedy."""
    try:
        yield
    except OSError as error:
        wanted = "5 bytes per token" if num_bytes is None else f"{num_bytes:,} bytes"
        free = shutil.disk_usage(path.parent).free / 2**20
        raise ResourceError(
            f"cannot write tokens to {path}",
            expected=f"free disk space for {wanted}, and no file-size limit below that",
            got=f"{error.strerror or error}, while {free:,.0f} MiB are free",
            remedy="free disk space, or set data.cache_folder to a folder on another disk, and run "
            "the command again, which reads the data from the beginning",
        ) from error
