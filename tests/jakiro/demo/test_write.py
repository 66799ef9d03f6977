"""Texts, prompts and small models that `jakiro data` writes."""

import json
from pathlib import Path

import pytest
from helpers.commands import exit_code
from helpers.models import tiny_llama
from helpers.tokenizers import tiny_tokenizer

from inference import SpeculativeDecoder
from inference.drafters.small_lm import SmallLMDrafter
from inference.generation.prompt_file import read_prompts
from jakiro.demo.corpus import load_corpus
from jakiro.demo.write import without_files


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """The folder of a target with its tokenizer."""
    tiny_llama(vocab=300, max_position_embeddings=512).save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def test_texts_are_own_continuations_and_library_source(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "texts.jsonl"
    words = ["texts", "--target", str(target), "--out", str(out), "--files", "3", "--batches", "1"]
    assert exit_code("data", *words) == 0
    texts = [json.loads(line)["text"] for line in out.read_text().splitlines()]
    sources = {file.text for file in load_corpus().train}
    assert len(texts) == 64 + 3
    assert sum(text in sources for text in texts) == 3
    assert exit_code("data", *words) == 2  # never overwritten


def test_source_files_of_prompts_are_left_out(tmp_path: Path) -> None:
    corpus = load_corpus()
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "x", "file": corpus.train[0].path}) + "\n")
    left = without_files(corpus, [prompts])
    assert left.train == corpus.train[1:]
    assert left.test == corpus.test


def test_a_missing_target_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["texts", "--target", str(tmp_path / "nowhere"), "--out", str(tmp_path / "texts.jsonl")]
    assert exit_code("data", *words) == 2
    assert "cannot load the target" in capsys.readouterr().err


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """The folder of a tokenizer."""
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_prompts_are_heads_from_the_files_in_the_given_order(
    tokenizer: Path, tmp_path: Path
) -> None:
    out = tmp_path / "prompts.jsonl"
    words = ["prompts", "--tokenizer", str(tokenizer), "--out", str(out), "--per-file", "3"]
    words += ["--max-tokens", "400", "enum.py", "gzip.py"]
    assert exit_code("data", *words) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    files = [record["file"] for record in records]
    assert files == ["enum.py"] * 3 + ["gzip.py"] * 3
    assert all(record["prompt"].endswith(":") for record in records)
    assert [prompt.category for prompt in read_prompts(out)] == files
    assert exit_code("data", *words) == 2  # never overwritten


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [("gone.py", None, "cannot read"), ("x.py", "y = 1\n", "no prompt")],
)
def test_files_without_prompts_are_refused(
    name: str,
    text: str | None,
    message: str,
    tokenizer: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    words = ["prompts", "--tokenizer", str(tokenizer), "--out", str(tmp_path / "prompts.jsonl")]
    assert exit_code("data", *words, "--library", str(tmp_path), name) == 2
    assert message in capsys.readouterr().err


def test_the_model_has_the_targets_tokenizer_and_drafts_for_it(tmp_path: Path) -> None:
    tokenizer, folder, out = tiny_tokenizer(), tmp_path / "target", tmp_path / "small"
    tokenizer.save_pretrained(folder)
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": "def main(argument):\n    return 1\n" * 400}) + "\n")
    words = ["small-lm", "--tokenizer", str(folder), "--texts", str(texts), "--out", str(out)]
    assert exit_code("data", *words, "--layers", "1", "--hidden", "32", "--steps", "2") == 0
    model = tiny_llama(vocab=len(tokenizer))
    drafter = SmallLMDrafter.from_pretrained(str(out), model, tokenizer)
    assert len(
        SpeculativeDecoder(model, drafter, tree="fixed")
        .generate([1, 2], max_new_tokens=3)
        .new_token_ids
    )
    assert exit_code("data", *words) == 2  # never overwritten


def test_texts_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    (tmp_path / "texts.jsonl").write_text('{"words": 1}\n')
    words = [
        "small-lm",
        "--tokenizer",
        str(tmp_path / "target"),
        "--texts",
        str(tmp_path / "texts.jsonl"),
    ]
    assert exit_code("data", *words, "--out", str(tmp_path / "small")) == 2
