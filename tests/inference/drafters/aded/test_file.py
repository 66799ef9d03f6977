"""Trigrams on disk: they are loaded as they were stored, and all other files are refused."""

from pathlib import Path

import numpy as np
import pytest
from helpers.tokenizers import tiny_tokenizer
from helpers.trigrams import known_trigrams
from safetensors.numpy import save
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from inference.drafters.aded.table import (
    TrigramCounter,
    TrigramIndex,
    load_trigrams,
    save_trigrams,
    vocabulary_size,
)
from jakiro.errors import CheckpointError, TargetMismatch


def _index() -> TrigramIndex:
    counter = TrigramCounter()
    counter.add(np.array([1, 2, 3, 1, 2, 4, 299, 0, 5], np.int64))
    return counter.index(100, 3)


def test_an_index_comes_back_as_it_was_stored(tmp_path: Path) -> None:
    index = _index()
    save_trigrams(index, tmp_path / "table", tiny_tokenizer(), num_tokens=9)
    loaded = load_trigrams(tmp_path / "table", tiny_tokenizer())
    assert known_trigrams(loaded) == known_trigrams(index)
    assert list(loaded.row(1, 2)) == list(index.row(1, 2))


def test_a_foreign_tokenizer_is_refused(tmp_path: Path) -> None:
    save_trigrams(_index(), tmp_path / "table", tiny_tokenizer())
    foreign = tiny_tokenizer()
    foreign.add_tokens(["<new>"])
    with pytest.raises(TargetMismatch, match="jakiro prepare trigrams"):
        load_trigrams(tmp_path / "table", foreign)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "table"
    with pytest.raises(CheckpointError, match="cannot load trigrams"):
        load_trigrams(path, tiny_tokenizer())
    save_trigrams(_index(), path, tiny_tokenizer())
    whole = path.read_bytes()
    for damaged in (b"", b"half of it", whole[: len(whole) // 2], whole[:-1], save({})):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="cannot load trigrams"):
            load_trigrams(path, tiny_tokenizer())


def test_tokens_that_the_target_does_not_have_are_left_out(tmp_path: Path) -> None:
    save_trigrams(_index(), tmp_path / "table", tiny_tokenizer())
    whole = load_trigrams(tmp_path / "table", tiny_tokenizer(), vocab_size=300)
    assert known_trigrams(whole) == known_trigrams(_index())
    less = known_trigrams(load_trigrams(tmp_path / "table", tiny_tokenizer(), vocab_size=4))
    assert {pair: row for pair, row in less.items() if row and max(pair) < 4} == {
        (1, 2): {3: 0.5},
        (2, 3): {1: 1.0},
        (3, 1): {2: 1.0},
    }
    assert load_trigrams(tmp_path / "table", tiny_tokenizer(), 3).row(1, 2) == {}


def test_a_vocabulary_with_gaps_ends_at_its_largest_id(tmp_path: Path) -> None:
    words = models.WordLevel({"a": 0, "b": 1, "c": 2, "d": 500}, unk_token="a")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))
    assert vocabulary_size(tokenizer) == 501 > len(tokenizer)
    counter = TrigramCounter()
    counter.add(np.array([1, 2, 500, 1, 2], np.int64))
    save_trigrams(counter.index(9), tmp_path / "table", tokenizer)
    assert load_trigrams(tmp_path / "table", tokenizer).row(1, 2) == {500: 1.0}
