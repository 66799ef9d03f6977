"""`jakiro prepare data`: its output, and the cache that training then reads."""

import re
from pathlib import Path

import pytest
from helpers.records import run_on_records, write_target_and_records
from helpers.tokenizers import tiny_tokenizer
from helpers.training import CHAT_TEMPLATE

from training.data import token_store
from training.data.token_store import open_tokens


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a target, and with data that has two unusable records."""
    return write_target_and_records(tmp_path)


def test_prepare_fills_the_cache_that_training_reads(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--cache-folder",
        str(folder / "cache"),
        "--skip-bad-records",
        "--sequence-length",
        "64",
    ]
    assert run_on_records(folder, "prepare data", *words) == 0
    printed = capsys.readouterr().out
    assert "4 records read, 2 skipped; 2 documents" in printed
    packed = r"2 documents packed into \d sequences with [\d.]+% padding; 1 document split"
    assert re.search(packed, printed)
    monkeypatch.delattr(token_store, "encode_records")
    store = open_tokens(
        [str(folder / "data.jsonl")],
        tiny_tokenizer(CHAT_TEMPLATE),
        folder / "cache",
        skip_bad_records=True,
        vocab_size=300,
    )
    assert store.num_documents == 2
