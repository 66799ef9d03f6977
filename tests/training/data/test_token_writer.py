"""Tokens are written completely or not at all, and dropped documents are counted."""

import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jakiro.errors import DataError, ResourceError
from training.data.counts import ReadCounts
from training.data.documents import Document
from training.data.sources import Intake, Record
from training.data.token_writer import hash_document, write_tokens


def _document(*token_ids: int, responses: int = 1) -> Document:
    """Return a document whose last tokens are a response."""
    is_response = np.arange(len(token_ids)) >= len(token_ids) - responses
    return Document(np.array(token_ids, np.int32), is_response)


DOCUMENTS = [_document(5, 6, 7), _document(8, 9, responses=2)]


def _record(number: int) -> Record:
    return Record({}, f"data.jsonl:{number}", number)


def test_files_hold_the_documents_in_order_with_their_records(tmp_path: Path) -> None:
    home = tmp_path / "home"
    write_tokens(home, [(_record(2), DOCUMENTS), (_record(5), DOCUMENTS[:1])], Intake())
    assert np.fromfile(home / "token_ids", np.int32).tolist() == [5, 6, 7, 8, 9, 5, 6, 7]
    assert np.fromfile(home / "is_response", np.bool_).nonzero()[0].tolist() == [2, 3, 4, 7]
    assert np.load(home / "starts.npy").tolist() == [0, 3, 5, 8]
    assert np.load(home / "locations.npy").tolist() == [[0, 2], [0, 2], [0, 5]]
    first, second, third = np.load(home / "hashes.npy").tolist()
    assert first == third == hash_document(DOCUMENTS[0]) != second


def test_documents_without_a_second_token_are_dropped_and_counted(tmp_path: Path) -> None:
    intake = Intake(is_skipping=True, num_records=4, num_skipped=1)
    records = [(_record(1), [_document(3), *DOCUMENTS]), (_record(2), [])]
    write_tokens(tmp_path / "home", records, intake)
    counts = ReadCounts.model_validate_json((tmp_path / "home" / "counts.json").read_bytes())
    assert counts == ReadCounts(
        records=4,
        skipped=1,
        dropped=1,
        documents=2,
        tokens=5,
        responses=3,
        highest_id=9,
    )


def test_data_without_anything_to_learn_is_refused(tmp_path: Path) -> None:
    for documents in ([], [_document(1)], [_document(1, 2, responses=0)]):
        with pytest.raises(DataError, match="nothing to learn from"):
            write_tokens(tmp_path / "home", [(_record(1), documents)], Intake())
        assert list(tmp_path.iterdir()) == []


def test_an_interrupted_reading_leaves_nothing_and_an_earlier_folder_untouched(
    tmp_path: Path,
) -> None:
    def interrupted() -> Iterator[tuple[Record, list[Document]]]:
        yield _record(1), DOCUMENTS
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tokens(tmp_path / "home", interrupted(), Intake())
    assert list(tmp_path.iterdir()) == []
    write_tokens(tmp_path / "home", [(_record(1), DOCUMENTS)], Intake())
    with pytest.raises(KeyboardInterrupt):
        write_tokens(tmp_path / "home", interrupted(), Intake())
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert len(np.fromfile(tmp_path / "home" / "token_ids", np.int32)) == 5


@pytest.mark.parametrize(
    ("limit", "num_tokens"), [(400, 200), (100, 2)], ids=["token_ids", "starts.npy"]
)
def test_a_full_disk_is_named_and_leaves_nothing_that_is_mistaken_for_a_cache(
    tmp_path: Path, limit: int, num_tokens: int
) -> None:
    records = [(_record(1), [_document(*range(num_tokens))])]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(ResourceError, match=r"cannot write tokens to .*free disk space"):
            write_tokens(tmp_path / "home", records, Intake())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
