"""The command that writes prompts from given source files."""

import json
from pathlib import Path

import pytest
from helpers.tokenizers import tiny_tokenizer

from inference.generation.prompt_file import read_bench_prompts
from jakiro.demo.write import main


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Return the folder of a tokenizer."""
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_prompts_are_heads_from_the_files_in_the_given_order(
    tokenizer: Path, tmp_path: Path
) -> None:
    out = tmp_path / "prompts.jsonl"
    words = ["prompts", "--tokenizer", str(tokenizer), "--out", str(out), "--per-file", "3"]
    words += ["--max-tokens", "400", "enum.py", "gzip.py"]
    assert main(words) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    files = [record["file"] for record in records]
    assert files == ["enum.py"] * 3 + ["gzip.py"] * 3
    assert all(record["prompt"].endswith(":") for record in records)
    assert [prompt.category for prompt in read_bench_prompts(out)] == files
    assert main(words) == 2  # never overwritten


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
    assert main([*words, "--library", str(tmp_path), name]) == 2
    assert message in capsys.readouterr().err
