"""Prompts of files of one's own choice."""

import json
from pathlib import Path

import pytest
from helpers.tokenizers import tiny_tokenizer

from inference.generation.prompt_file import read_prompts
from jakiro.demo.write import main


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A tokenizer on disk."""
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_prompts_are_heads_of_the_files_in_their_order(tokenizer: Path, tmp_path: Path) -> None:
    out = tmp_path / "prompts.jsonl"
    words = ["prompts", "--tokenizer", str(tokenizer), "--out", str(out), "--per-file", "3"]
    words += ["--max-tokens", "400", "enum.py", "gzip.py"]
    assert main(words) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["file"] for row in rows] == ["enum.py"] * 3 + ["gzip.py"] * 3
    assert all(row["prompt"].endswith(":") for row in rows)
    assert [one.category for one in read_prompts(out)] == [row["file"] for row in rows]
    assert main(words) == 2  # never written over


@pytest.mark.parametrize(
    ("name", "text", "said"), [("gone.py", None, "cannot read"), ("x.py", "y = 1\n", "no prompt")]
)
def test_files_without_prompts_are_refused(
    name: str,
    text: str | None,
    said: str,
    tokenizer: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    words = ["prompts", "--tokenizer", str(tokenizer), "--out", str(tmp_path / "prompts.jsonl")]
    assert main([*words, "--library", str(tmp_path), name]) == 2
    assert said in capsys.readouterr().err
