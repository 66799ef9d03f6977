"""In single precision, rounding changes no greedy token."""

import json
from pathlib import Path

import pytest
from helpers.commands import exit_code
from helpers.models import tiny_llama
from helpers.tokenizers import tiny_tokenizer


@pytest.fixture
def target_folder(tmp_path: Path) -> Path:
    """The folder of a tiny target with its tokenizer."""
    folder = tmp_path / "target"
    tiny_llama(vocab=300).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_nothing_is_decided_by_rounding_in_float32(
    target_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--dtype", "float32", "--count", "2", "--new-tokens", "6"]
    assert exit_code("profile", "rounding", "--target", str(target_folder), *options) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {each["value"] for each in document["argmax_differs"].values()} == {0}
    assert {each["value"] for each in document["continuations_differ"].values()} == {0}
    assert document["positions"] == 12
