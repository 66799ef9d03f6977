"""Families are recognized by their tensors; those that cannot be imported are named."""

from pathlib import Path

import pytest
import torch
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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.61.eh_proj.weight", "an MTP head"),
        ("mtp.fc.weight", "an MTP head"),
        ("model.mtp_layers.0.input_layernorm.weight", "an MTP head"),
        ("0.0.linear.weight", "Medusa heads"),
        ("blocks.0.layers.0.weight", "Medusa heads"),
        ("encoder.weight", r"tensors such as encoder\.weight"),
    ],
)
def test_other_families_are_refused_by_name(name: str, message: str, tmp_path: Path) -> None:
    folder = save_published(tmp_path, {name: torch.zeros(4, 4)}, {})
    with pytest.raises(CheckpointError, match=f"{message}.*docs/guides/exchange.md"):
        plan_import(read_checkpoint(folder))


def test_heads_of_medusa_are_recognized_by_their_config(tmp_path: Path) -> None:
    config = {"medusa_num_heads": 5}
    with pytest.raises(CheckpointError, match="Medusa heads"):
        plan_import(read_checkpoint(save_published(tmp_path, {"a": torch.zeros(1)}, config)))


def test_a_whole_model_is_no_drafter(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="tensors such as"):
        plan_import(read_checkpoint(tmp_path))


def test_a_drafter_of_this_project_needs_no_import(tmp_path: Path) -> None:
    tiny_drafter(TargetAdapter(tiny_llama())).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="a drafter of this project; remedy: use it as it is"):
        plan_import(read_checkpoint(tmp_path))
