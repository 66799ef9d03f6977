"""The same data is encoded only once; a cache is written completely or not at all."""

import resource
from pathlib import Path

import numpy as np
import pytest
from helpers.tokenizers import tiny_tokenizer
from helpers.training import CHAT_TEMPLATE, TEXTS, write_jsonl

from jakiro.errors import DataError, ResourceError
from training.data import token_store
from training.data.documents import Document
from training.data.sources import Intake, Record
from training.data.token_store import TokenStore, open_tokens, write_tokens


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "texts.jsonl", ({"text": text} for text in TEXTS))


def open_in(folder: Path, data: Path) -> TokenStore:
    return open_tokens([str(data)], tiny_tokenizer(), folder / "cache")


def forbid_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the data was read again")

    monkeypatch.setattr(token_store, "encode_records", refuse)


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


def _record(number: int) -> Record:
    return Record({}, f"data.jsonl:{number}", number)


def test_data_without_anything_to_learn_is_refused(tmp_path: Path) -> None:
    for documents in ([], [_document(1)], [_document(1, 2, responses=0)]):
        with pytest.raises(DataError, match="nothing to learn from"):
            write_tokens(tmp_path / "home", [(_record(1), documents)], Intake())
        assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_named_and_leaves_nothing_that_is_mistaken_for_a_cache(
    tmp_path: Path,
) -> None:
    records = [(_record(1), [_document(*range(200))])]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, hard))
    try:
        with pytest.raises(ResourceError, match=r"cannot write tokens to .*free disk space"):
            write_tokens(tmp_path / "tokens.safetensors", records, Intake())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
