"""Fixtures for tests that train: folders with a target, its tokenizer, texts and a run."""

import shutil
from pathlib import Path

import pytest
from helpers.models import tiny_llama
from helpers.tokenizers import tiny_tokenizer
from helpers.training import TEXTS, tiny_run, write_jsonl

from training.train import train


@pytest.fixture(scope="session")
def _workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workshop")
    tiny_llama(vocab=300, eos_token_id=0).save_pretrained(folder / "target")
    tiny_tokenizer(texts=TEXTS).save_pretrained(folder / "target")
    write_jsonl(folder / "texts.jsonl", ({"text": text} for text in TEXTS))
    return folder


@pytest.fixture
def workshop(_workshop: Path, tmp_path: Path) -> Path:
    """Return a folder for one test, with `target` and `texts.jsonl`."""
    return shutil.copytree(_workshop, tmp_path / "workshop")


@pytest.fixture(scope="session")
def _trained_workshop(_workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(_workshop, tmp_path_factory.mktemp("trained") / "workshop")
    train(tiny_run(folder, steps=2))
    return folder


@pytest.fixture
def trained_workshop(_trained_workshop: Path, tmp_path: Path) -> Path:
    """Return a folder like `workshop` that also contains the run of `tiny_run(folder, steps=2)`."""
    return shutil.copytree(_trained_workshop, tmp_path / "trained", symlinks=True)
