"""A target on disk for the tests of measurements."""

from pathlib import Path

import pytest
from helpers.models import tiny_llama
from helpers.tokenizers import tiny_tokenizer


@pytest.fixture
def target_folder(tmp_path: Path) -> Path:
    """The folder of a tiny target with its tokenizer."""
    folder = tmp_path / "target"
    tiny_llama(vocab=300).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
