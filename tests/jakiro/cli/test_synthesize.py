"""`jakiro synthesize`: its file and report, a continued run, and errors in one line."""

import json
from pathlib import Path

import pytest
from helpers.commands import exit_code
from helpers.models import tiny_llama
from helpers.templates import CHATML
from helpers.tokenizers import tiny_tokenizer

SMALL = ["--max-new-tokens", "16", "--max-question-tokens", "32", "--seed", "3"]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """The folder of a chat model that often ends its turn."""
    tokenizer = tiny_tokenizer(CHATML)
    model = tiny_llama(vocab=300, max_position_embeddings=256, initializer_range=0.1)
    model.generation_config.eos_token_id = list(range(0, 300, 7))
    model.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def _run(target: Path, conversations: int, *words: str) -> int:
    out = ["--out", str(target.parent / "own.jsonl")]
    count = ["--conversations", str(conversations)]
    return exit_code("synthesize", "--target", str(target), *out, *count, *SMALL, *words)


def test_records_are_written_counted_and_continued(
    target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(target, 3) == 0
    printed = capsys.readouterr().out
    assert "3 records in" in printed
    assert "tokens generated; dropped:" in printed
    assert _run(target, 5) == 0
    assert "5 records in" in (printed := capsys.readouterr().out)
    assert "2 of them new" in printed
    lines = (target.parent / "own.jsonl").read_text().splitlines()
    assert len({json.loads(line)["messages"][0]["content"] for line in lines}) == 5
