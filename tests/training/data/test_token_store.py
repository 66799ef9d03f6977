"""The same data is encoded only once; a cache is written completely or not at all."""

import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.tokenizers import tiny_tokenizer
from helpers.training import CHAT_TEMPLATE, TEXTS, write_jsonl

from jakiro.errors import DataError, ResourceError
from training.data import token_store
from training.data.documents import Document
from training.data.sources import Intake, Record
from training.data.token_store import ReadCounts, TokenStore, open_tokens, write_tokens


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "texts.jsonl", ({"text": text} for text in TEXTS))


def open_in(folder: Path, data: Path) -> TokenStore:
    return open_tokens([str(data)], tiny_tokenizer(), folder / "cache")


def forbid_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the data was read again")

    monkeypatch.setattr(token_store, "encode_records", refuse)


def test_documents_come_back_as_they_were_encoded(tmp_path: Path, data: Path) -> None:
    store, tokenizer = open_in(tmp_path, data), tiny_tokenizer()
    assert store.num_documents == len(TEXTS)
    for index, text in enumerate(TEXTS):
        expected = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        assert store.document(index).token_ids.tolist() == expected
        assert store.document(index).is_response.all()


def test_the_same_content_is_not_read_again(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_in(tmp_path, data)
    forbid_reading(monkeypatch)
    moved = data.rename(data.with_name("moved.jsonl"))
    np.testing.assert_array_equal(open_in(tmp_path, moved).token_ids, first.token_ids)


def test_other_content_or_another_template_is_read_again(tmp_path: Path, data: Path) -> None:
    first = open_in(tmp_path, data)
    data.write_text(data.read_text() + '{"text": "one more"}\n')
    assert open_in(tmp_path, data).num_documents == first.num_documents + 1
    templated = open_tokens([str(data)], tiny_tokenizer(CHAT_TEMPLATE), tmp_path / "cache")
    assert templated.fingerprint != first.fingerprint


def test_another_end_of_text_is_not_taken_from_the_cache(tmp_path: Path, data: Path) -> None:
    before = open_in(tmp_path, data)
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "a"
    now = open_tokens([str(data)], tokenizer, tmp_path / "cache")
    assert now.fingerprint != before.fingerprint
    assert now.document(0).token_ids[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    "name", ["token_ids", "is_response", "starts.npy", "locations.npy", "counts.json"]
)
def test_a_damaged_cache_is_built_again(tmp_path: Path, data: Path, name: str) -> None:
    first = open_in(tmp_path, data)
    expected = first.token_ids.copy()
    (path,) = (tmp_path / "cache").glob(f"*/{name}")
    whole = path.read_bytes()
    for left in (whole[:-7], b""):
        path.write_bytes(left)
        again = open_in(tmp_path, data)
        np.testing.assert_array_equal(again.token_ids, expected)
        assert again.num_documents == len(TEXTS)
        assert path.read_bytes() == whole


def test_unusable_records_end_the_reading_or_are_skipped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = write_jsonl(tmp_path / "texts.jsonl", [{"text": TEXTS[0]}, {"no": 1}, {"text": "more"}])
    data.write_text('{"text": "cut\n[]\n' + data.read_text())
    with pytest.raises(DataError, match=r"texts\.jsonl:1 is not JSON"):
        open_in(tmp_path, data)
    store = open_tokens([str(data)], tiny_tokenizer(), tmp_path / "cache", skip_bad_records=True)
    assert store.num_documents == 2
    assert store.counts is not None
    assert (store.counts.records, store.counts.skipped) == (5, 3)
    for line, fault in ((1, "is not JSON"), (2, "is not an object"), (4, "is neither a text")):
        assert f"texts.jsonl:{line} {fault}" in caplog.text


def test_cached_tokens_are_refused_for_a_target_that_does_not_have_all_of_them(
    tmp_path: Path, data: Path
) -> None:
    highest = int(open_in(tmp_path, data).token_ids.max())
    options = {"paths": [str(data)], "tokenizer": tiny_tokenizer()}
    cache = tmp_path / "cache"
    assert open_tokens(**options, cache_folder=cache, vocab_size=highest + 1).num_documents
    with pytest.raises(DataError, match="a token that the target does not have"):
        open_tokens(**options, cache_folder=cache, vocab_size=highest)


def test_documents_know_their_lines_whatever_was_dropped_between_them(tmp_path: Path) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", [{"text": TEXTS[0]}, {"text": ""}])
    second = write_jsonl(tmp_path / "b.jsonl", [{"no": 1}, {"text": "more"}])
    second.write_text("\n" + second.read_text())
    paths = [str(first), str(second)]
    for _ in range(2):  # from the files, then from the cache
        store = open_tokens(paths, tiny_tokenizer(), tmp_path / "cache", skip_bad_records=True)
        assert store.describe([0]) == f"{first}:1"
        assert store.describe([0, 1]) == f"{first}:1, {second}:3"
    second = second.rename(tmp_path / "moved.jsonl")
    paths = [str(first), str(second)]
    store = open_tokens(paths, tiny_tokenizer(), tmp_path / "cache", skip_bad_records=True)
    assert store.describe([1]) == f"{second}:3"


def _document(*token_ids: int, responses: int = 1) -> Document:
    """Return a document whose last tokens are a response."""
    is_response = np.arange(len(token_ids)) >= len(token_ids) - responses
    return Document(np.array(token_ids, np.int32), is_response)


DOCUMENTS = [_document(5, 6, 7), _document(8, 9, responses=2)]


def _record(number: int) -> Record:
    return Record({}, f"data.jsonl:{number}", number)


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
    (tmp_path / ".home.0.partial").mkdir()  # of a process that was killed
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
