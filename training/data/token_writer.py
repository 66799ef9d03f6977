"""Writing tokens into the cache, document after document, and counting what comes of the data."""

import hashlib
import json
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from jakiro.errors import DataError
from jakiro.files import write_atomically
from training.data.counts import ReadCounts
from training.data.documents import Document
from training.data.intake import Intake
from training.data.sources import Record


def write_tokens(
    folder: Path, rows: Iterable[tuple[Record, Sequence[Document]]], intake: Intake
) -> None:
    """Write what a `TokenStore` maps.

    Args:
        folder: an empty one.
        rows: of data, each with its documents.
        intake: has counted the rows when they have been taken.

    Raises:
        DataError: there is no response in any document.
    """
    starts, hashes, places = array("q", [0]), array("Q"), array("q")
    num_responses, num_dropped, highest_id = 0, 0, 0
    with (folder / "token_ids").open("wb") as ids, (folder / "is_response").open("wb") as mask:
        for record, document in ((record, one) for record, own in rows for one in own):
            if len(document.token_ids) < 2:  # nothing follows anything
                num_dropped += 1
                continue
            starts.append(starts[-1] + len(document.token_ids))
            hashes.append(hash_document(document))
            places.extend((record.source, record.number))
            num_responses += int(document.is_response.sum())
            highest_id = max(highest_id, int(document.token_ids.max()))
            ids.write(document.token_ids.tobytes())
            mask.write(document.is_response.tobytes())
    counts = ReadCounts(
        rows=intake.rows,
        skipped=intake.skipped,
        dropped=num_dropped,
        documents=len(hashes),
        tokens=starts[-1],
        responses=num_responses,
        rich=intake.rich,
        highest_id=highest_id,
    )
    if num_responses == 0:
        raise DataError(
            "the data holds nothing to learn from",
            expected="documents with response tokens",
            got=f"{counts.documents} documents without any, {counts.skipped} rows skipped",
        )
    np.save(folder / "starts.npy", np.array(starts, np.int64))
    np.save(folder / "hashes.npy", np.array(hashes, np.uint64))
    np.save(folder / "rows.npy", np.array(places, np.int64).reshape(-1, 2))
    write_atomically(folder / "counts.json", counts.model_dump_json())
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    write_atomically(folder / "sizes.json", json.dumps(sizes))


def hash_document(document: Document) -> int:
    """Return a hash of a document's tokens."""
    digest = hashlib.sha256(document.token_ids.tobytes()).digest()
    return int.from_bytes(digest[:8], "big")
