"""The command that writes training text for a target, without the files of its prompts."""

import json
from pathlib import Path

import pytest
from helpers.models import tiny_llama
from helpers.tokenizers import tiny_tokenizer

from jakiro.demo.corpus import load_corpus
from jakiro.demo.write import main, without_files


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Return the folder of a target with its tokenizer."""
    tiny_llama(vocab=300, max_position_embeddings=512).save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def test_texts_are_own_continuations_and_library_source(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "texts.jsonl"
    words = ["texts", "--target", str(target), "--out", str(out), "--files", "3", "--batches", "1"]
    assert main(words) == 0
    texts = [json.loads(line)["text"] for line in out.read_text().splitlines()]
    sources = {file.text for file in load_corpus().train}
    assert len(texts) == 64 + 3
    assert sum(text in sources for text in texts) == 3
    assert main(words) == 2  # never overwritten


def test_source_files_of_prompts_are_left_out(tmp_path: Path) -> None:
    corpus = load_corpus()
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "x", "file": corpus.train[0].path}) + "\n")
    left = without_files(corpus, [prompts])
    assert left.train == corpus.train[1:]
    assert left.test == corpus.test


def test_a_missing_target_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["texts", "--target", str(tmp_path / "nowhere"), "--out", str(tmp_path / "texts.jsonl")]
    assert main(words) == 2
    assert "cannot load the target" in capsys.readouterr().err
