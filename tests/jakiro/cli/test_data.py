"""`jakiro data`: files that exist or cannot be read are refused in one line."""

from pathlib import Path

import pytest
from helpers.commands import exit_code


def test_existing_files_are_never_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    places = ("--tokenizer", ".", "--out", str(taken))
    assert exit_code("data", "prompts", *places, "enum.py") == 2
    assert exit_code("data", "small-lm", *places, "--texts", "nowhere.jsonl") == 2
    assert exit_code("data", "texts", "--target", ".", "--out", str(taken)) == 2
    assert capsys.readouterr().err.count("choose another name for --out") == 3
    assert taken.read_text() == "mine"


def test_prompts_that_cannot_be_read_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--target", ".", "--out", str(tmp_path / "new.jsonl"))
    missing = str(tmp_path / "missing.jsonl")
    assert exit_code("data", "texts", *words, "--leave-out", missing) == 2
    assert f"cannot read the prompts in {missing}" in capsys.readouterr().err
