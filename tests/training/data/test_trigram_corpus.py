"""Trigram counts of a corpus; cutting a text into pieces loses only trigrams across borders."""

import json
import logging
from pathlib import Path

import pytest
from helpers.tokenizers import TEXT, tiny_tokenizer

from jakiro.errors import DataError
from training.data import documents, trigram_corpus
from training.data.trigram_corpus import corpus_records, count_trigrams


def test_a_large_text_is_counted_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tokenizer, seen = tmp_path / "large.txt", tiny_tokenizer(), []
    path.write_text(TEXT * 40)
    whole = count_trigrams(tokenizer, corpus_records([str(path)]))
    monkeypatch.setattr(trigram_corpus, "_PIECE", len(TEXT) - 1)
    monkeypatch.setattr(documents, "BATCH_SIZE", 4)
    counter = count_trigrams(tokenizer, corpus_records([str(path)]), seen.append)
    assert len(seen) == 40
    assert seen == sorted(set(seen))
    assert counter.num_tokens == whole.num_tokens == len(tokenizer(TEXT * 40)["input_ids"]) + 1
    found, expected = (each.index(1 << 12) for each in (counter, whole))
    assert set(found.keys.tolist()) <= set(expected.keys.tolist())
    first, second, third = tokenizer(TEXT)["input_ids"][:3]
    assert third in found.row(first, second)


@pytest.mark.parametrize("mask", [[1, 1, 1, 1], [0, 0, 0, 0]])
def test_records_count_whatever_their_mask(mask: list[int], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"input_ids": [4, 5, 6, 7], "loss_mask": mask}))
    counter = count_trigrams(tiny_tokenizer(), corpus_records([str(path)]))
    assert counter.num_trigrams == 2


def test_a_folder_of_texts_is_counted_without_other_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.py").write_text(TEXT)
    (tmp_path / "latin.py").write_bytes("# caf\u00e9, caf\u00e9, caf\u00e9".encode("latin-1"))
    (tmp_path / "package.json").write_text('{"name": "no rows"}')
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    with caplog.at_level(logging.WARNING):
        counter = count_trigrams(tiny_tokenizer(), corpus_records([str(tmp_path)]))
    assert counter.num_tokens == 2 * (len(tiny_tokenizer()(TEXT)["input_ids"]) + 1)
    assert "latin.py is not UTF-8" in caplog.text
    with pytest.raises(DataError, match=r"latin\.py"):
        list(corpus_records([str(tmp_path / "latin.py")]))
