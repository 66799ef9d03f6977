"""The demo's corpus, its splits, its tokenizer, and the held-out prompts."""

import ast
from pathlib import Path
from typing import Literal

import pytest
from transformers import AutoTokenizer

from jakiro.demo.corpus import Corpus, SourceFile, load_corpus, split_of
from jakiro.demo.prompts import prompts_from_split
from jakiro.demo.target import END_OF_TEXT, encode_documents, train_tokenizer
from jakiro.errors import DataError

MODULE = '''"""Stacks of things, number {number}."""

import bisect


class Stack{number}:
    """A stack of things."""

    def __init__(self, things=()):
        self._things = list(things)

    @property
    def top{number}(self):
        return self._things[-1]

    def push(self, thing, *,
             twice{number}=False):
        # Twice is for those who insist.
        self._things.extend([thing] * (1 + twice))

    def is_empty(self): return not self._things
'''
TEXTS = [MODULE.format(number=number) for number in range(40)]


def write_library(folder: Path) -> Path:
    for number, text in enumerate(TEXTS):
        path = folder / f"package{number % 3}" / f"module{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def load(folder: Path) -> Corpus:
    return load_corpus(folder, min_characters=1000)


def paths_of(corpus: Corpus) -> list[str]:
    return [file.path for file in (*corpus.train, *corpus.dev, *corpus.test)]


def test_the_splits_of_this_interpreters_library_share_no_file() -> None:
    corpus = load_corpus()
    paths = paths_of(corpus)
    assert len(paths) == len(set(paths)) > 300
    assert "argparse.py" in paths
    for files in (corpus.dev, corpus.test):
        assert 0.02 < len(files) / len(paths) < 0.10
    assert all(file.text.strip() for file in corpus.train)


def test_test_suites_tables_and_foreign_packages_are_left_out(tmp_path: Path) -> None:
    corpus = load(write_library(tmp_path))
    for name in ("site-packages/torch", "test", "json/tests", "encodings", "config-3.11"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "more.py").write_text("x = 1\n")
    (tmp_path / "_sysconfigdata__linux.py").write_text("build_time_vars = {}\n")
    (tmp_path / "empty.py").write_text("\n")
    (tmp_path / "latin.py").write_bytes("# -*- coding: latin-1 -*-\nname = 'é'\n".encode("latin-1"))
    assert load(tmp_path) == corpus


def test_the_split_of_a_file_depends_only_on_its_path(tmp_path: Path) -> None:
    before = load(write_library(tmp_path))
    changed = tmp_path / before.dev[0].path
    changed.write_text("changed = True\n")
    after = load(tmp_path)
    assert paths_of(after) == paths_of(before)
    assert after.fingerprint != before.fingerprint
    assert split_of(before.dev[0].path) == "dev"


def test_the_fingerprint_depends_on_contents_and_not_on_the_folder(tmp_path: Path) -> None:
    first, second = write_library(tmp_path / "first"), write_library(tmp_path / "second")
    assert load(first) == load(second)


def test_missing_library_source_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="too little Python source"):
        load_corpus(tmp_path / "python311.zip")


def test_tokenizer_returns_any_text_unchanged(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TEXTS, vocab_size=400)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in (TEXTS[0], " x\t= 'naïve — 試す' ;\r\n\n\n    pass   \n", "def f( a ) : . ,"):
        ids = loaded.encode(text, add_special_tokens=False)
        assert loaded.decode(ids) == text
        assert ids == tokenizer.encode(text, add_special_tokens=False)


def test_line_break_and_indentation_are_one_token() -> None:
    tokenizer = train_tokenizer(TEXTS, vocab_size=400)
    ids = tokenizer.encode("\n        self", add_special_tokens=False)
    assert tokenizer.decode(ids[:1]) == "\n        "


def test_same_texts_give_the_same_tokenizer() -> None:
    first, second = (train_tokenizer(TEXTS, vocab_size=400) for _ in range(2))
    assert first.get_vocab() == second.get_vocab()


def test_every_document_ends_with_the_end_of_text() -> None:
    tokenizer = train_tokenizer(TEXTS, vocab_size=400)
    ids = encode_documents(tokenizer, ["a = 1\n", "b = 2\n"])
    assert tokenizer.decode(ids) == f"a = 1\n{END_OF_TEXT}b = 2\n{END_OF_TEXT}"
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == ids[-1] == 0


@pytest.mark.parametrize("split", ["dev", "test"])
def test_prompts_come_from_held_out_files_and_differ(split: Literal["dev", "test"]) -> None:
    corpus = load_corpus()
    tokenizer = train_tokenizer([file.text for file in corpus.train[:20]], vocab_size=1024)
    prompts = prompts_from_split(corpus, split, tokenizer, count=40)
    text_of = {file.path: file.text for file in corpus.files(split)}
    assert len({prompt.text for prompt in prompts}) == 40
    assert len({prompt.path for prompt in prompts}) >= 15
    for prompt in prompts:
        assert prompt.text in text_of[prompt.path]
        assert prompt.text.endswith(":")
        assert 32 <= len(tokenizer.encode(prompt.text)) <= 96
    assert prompts[:10] == prompts_from_split(corpus, split, tokenizer, count=10)


def test_prompts_end_after_the_whole_head() -> None:
    files = tuple(SourceFile(f"{n}.py", text) for n, text in enumerate(TEXTS))
    corpus = Corpus(train=files[2:], dev=files[:1], test=files[1:2], fingerprint="")
    tokenizer = train_tokenizer(TEXTS, vocab_size=400)
    prompts = prompts_from_split(corpus, "dev", tokenizer, count=4, min_tokens=1, max_tokens=200)
    assert {prompt.text.splitlines()[-1].strip() for prompt in prompts} == {
        "class Stack0:",
        "def __init__(self, things=()):",
        "def top0(self):",
        "twice0=False):",
    }
    for prompt in prompts:
        ast.parse(f"{prompt.text} pass")


def test_asking_for_more_prompts_than_there_are_is_a_clear_error() -> None:
    files = tuple(SourceFile(f"{n}.py", text) for n, text in enumerate(TEXTS))
    corpus = Corpus(train=files[2:], dev=files[:1], test=files[1:2], fingerprint="")
    tokenizer = train_tokenizer(TEXTS, vocab_size=400)
    with pytest.raises(DataError, match="too few prompts in the dev files; expected: 50; got: 4"):
        prompts_from_split(corpus, "dev", tokenizer, count=50, min_tokens=1, max_tokens=200)
