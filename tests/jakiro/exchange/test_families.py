"""Families are recognized by their tensors; those that cannot be imported are named."""

from pathlib import Path

import pytest
from helpers.models import tiny_drafter, tiny_llama
from helpers.published import eagle_config, eagle_weights, jakiro_weights, save_published
from helpers.published_moa import moa_weights

from jakiro.errors import CheckpointError
from jakiro.exchange.checkpoint import read_checkpoint
from jakiro.exchange.families import plan_import
from jakiro.target.adapter import TargetAdapter


def test_families_are_recognized(tmp_path: Path) -> None:
    families = {
        "EAGLE-1, EAGLE-2 or HASS": eagle_weights(),
        "Jakiro as published": jakiro_weights(),
        "Mixture of Attentions": moa_weights(),
    }
    for family, weights in families.items():
        folder = save_published(tmp_path / family, weights, eagle_config(), "prefixed")
        assert plan_import(read_checkpoint(folder)).family == family


def test_a_drafter_of_this_project_needs_no_import(tmp_path: Path) -> None:
    tiny_drafter(TargetAdapter(tiny_llama())).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="a drafter of this project; remedy: use it as it is"):
        plan_import(read_checkpoint(tmp_path))
