"""Runs commands of `jakiro` in this process, on the models of a folder."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import tiny_llama, tiny_settings
from helpers.tokenizers import tiny_tokenizer

from jakiro.cli import main
from jakiro.config import config_for
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter
from jakiro.target.record import record_target


def exit_code(*words: object) -> int:
    """Run `jakiro` with these arguments and return its exit code."""
    with pytest.raises(SystemExit) as exit_info:
        main([*map(str, words)])
    return int(exit_info.value.code or 0)


def write_models(folder: Path, template: str | None = None, **options: Any) -> Path:
    """Write `target`, a `drafter` for it, and `other` with other weights; return the folder."""
    tokenizer = tiny_tokenizer(template)
    for name, seed in (("other", 5), ("target", 0)):
        model = tiny_llama(vocab=len(tokenizer), seed=seed, **options)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    record = record_target(TargetAdapter(model).spec, str(folder / "target"), tokenizer)
    torch.manual_seed(0)
    JakiroDrafter(config_for(tiny_settings(), record)).save_pretrained(folder / "drafter")
    return folder
