"""Writer of the token cache, which counts records and documents."""

import hashlib
import json
import shutil
from array import array
from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jakiro.errors import DataError, ResourceError
from jakiro.utils.files import publish
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
        partial.mkdir()
        _write(partial, records, intake)
        shutil.rmtree(home, ignore_errors=True)
        publish(partial, home)
    except OSError as error:
        raise ResourceError(
            f"cannot write tokens to {home}",
            got=error.strerror or error,
            remedy="free disk space, or set data.cache_folder to a folder on another disk",
        ) from error
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
    with (folder / "token_ids").open("wb") as ids, (folder / "is_response").open("wb") as masks:
        pairs = ((record, document) for record, documents in records for document in documents)
        for record, document in pairs:
            if len(document.token_ids) < 2:  # there is nothing to predict
                num_dropped += 1
                continue
            starts.append(starts[-1] + len(document.token_ids))
            hashes.append(hash_document(document))
            locations.extend((record.source, record.number))
            num_responses += int(document.is_response.sum())
            highest_id = max(highest_id, int(document.token_ids.max()))
            ids.write(document.token_ids.tobytes())
            masks.write(document.is_response.tobytes())
    counts = ReadCounts(
        records=intake.num_records,
        skipped=intake.num_skipped,
        unlearned=intake.num_unlearned,
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
        )
    _save_array(folder / "starts.npy", np.array(starts, np.int64))
    _save_array(folder / "hashes.npy", np.array(hashes, np.uint64))
    _save_array(folder / "locations.npy", np.array(locations, np.int64).reshape(-1, 2))
    (folder / "counts.json").write_text(counts.model_dump_json())
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    (folder / "sizes.json").write_text(json.dumps(sizes))


def _save_array(path: Path, content: npt.NDArray[Any]) -> None:
    # np.save does not notice if only part of a file is written, so save the array to memory first.
    stream = BytesIO()
    np.save(stream, content)
    path.write_bytes(stream.getvalue())
