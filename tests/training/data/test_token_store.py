"""The same data is encoded only once; a cache is written completely or not at all."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.tokenizers import tiny_tokenizer
from helpers.training import CHAT_TEMPLATE, TEXTS, write_jsonl

from jakiro.errors import DataError
from training.data import token_store
from training.data.documents import Document
from training.data.sources import Intake, Record
from training.data.token_store import ReadCounts, TokenStore, open_tokens, write_tokens


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "texts.jsonl", ({"text": text} for text in TEXTS))


def open_in(folder: Path, data: Path) -> TokenStore:
    return open_tokens([str(data)], tiny_tokenizer(), folder / "cache")


def store_counts(folder: Path, data: Path) -> ReadCounts:
    counts = open_in(folder, data).counts
    assert counts is not None
    return counts


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
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "a"
    ended = open_tokens([str(data)], tokenizer, tmp_path / "cache")
    assert len({store.fingerprint for store in (first, templated, ended)}) == 3
    assert ended.document(0).token_ids[-1] == tokenizer.eos_token_id


def test_a_damaged_cache_is_built_again(tmp_path: Path, data: Path) -> None:
    expected = open_in(tmp_path, data).token_ids.copy()
    (path,) = (tmp_path / "cache").glob("*.safetensors")
    whole = path.read_bytes()
    for left in (whole[:-7], b""):
        path.write_bytes(left)
        again = open_in(tmp_path, data)
        np.testing.assert_array_equal(again.token_ids, expected)
        assert again.num_documents == len(TEXTS)
        assert path.read_bytes() == whole


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
        assert [store.location(n) for n in (0, 1)] == [f"{first}:1", f"{second}:3"]
    second = second.rename(tmp_path / "moved.jsonl")
    paths = [str(first), str(second)]
    store = open_tokens(paths, tiny_tokenizer(), tmp_path / "cache", skip_bad_records=True)
    assert store.location(1) == f"{second}:3"


def _document(*token_ids: int, responses: int = 1) -> Document:
    """Return a document whose last tokens are a response."""
    is_response = np.arange(len(token_ids)) >= len(token_ids) - responses
    return Document(np.array(token_ids, np.int32), is_response)


def _record(number: int) -> Record:
    return Record({}, f"data.jsonl:{number}", number)


DOCUMENTS = [_document(5, 6, 7), _document(8, 9, responses=2)]


def test_kept_and_dropped_documents_are_counted(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = [(_record(1), [_document(3), *DOCUMENTS]), (_record(2), [])]
    monkeypatch.setattr(token_store, "encode_records", lambda *_: read)
    expected = ReadCounts(
        records=0, skipped=0, dropped=1, documents=2, tokens=5, responses=3, highest_id=9
    )
    assert store_counts(tmp_path, data) == store_counts(tmp_path, data) == expected


def test_an_interrupted_reading_leaves_nothing_and_an_earlier_file_untouched(
    tmp_path: Path,
) -> None:
    def interrupted() -> Iterator[tuple[Record, list[Document]]]:
        yield _record(1), DOCUMENTS
        raise KeyboardInterrupt

    path = tmp_path / "tokens.safetensors"
    with pytest.raises(KeyboardInterrupt):
        write_tokens(path, interrupted(), Intake())
    assert list(tmp_path.iterdir()) == []
    write_tokens(path, [(_record(1), DOCUMENTS)], Intake())
    whole = path.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        write_tokens(path, interrupted(), Intake())
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == whole


def test_data_without_anything_to_learn_is_refused(tmp_path: Path) -> None:
    for documents in ([], [_document(1)], [_document(1, 2, responses=0)]):
        with pytest.raises(DataError, match="nothing to learn from"):
            write_tokens(tmp_path / "home", [(_record(1), documents)], Intake())
        assert list(tmp_path.iterdir()) == []
