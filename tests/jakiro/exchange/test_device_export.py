"""Drafters for machines that do not have the target."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import tiny_family
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.tokenizers import tiny_tokenizer

from jakiro.drafter import JakiroDrafter
from jakiro.errors import CheckpointError, ConfigError, TargetMismatch
from jakiro.exchange.device_export import export_device
from jakiro.target.adapter import TargetAdapter
from jakiro.target.ends import (
    DESCRIPTION_FILE,
    WEIGHTS_FILE,
    EmbeddingForm,
    read_device_target,
)

TOKENIZER = tiny_tokenizer(None)


def _target(**changes: Any) -> TargetAdapter:
    return TargetAdapter(tiny_llama(vocab=len(TOKENIZER), **changes))


@pytest.mark.parametrize(
    ("form", "size", "is_tied"),
    [("own", None, True), ("own", 20, False), ("int8", None, False), ("int8", 20, True)],
)
def test_embedding_and_logits_are_those_of_the_target(
    tmp_path: Path, form: EmbeddingForm, size: int | None, is_tied: bool
) -> None:
    target = _target(tie_word_embeddings=is_tied)
    drafter = tiny_drafter(target, tiny_settings(draft_vocab_size=size))
    export_device(drafter, target, TOKENIZER, tmp_path / "out", form)
    again = JakiroDrafter.from_pretrained(tmp_path / "out")
    device = read_device_target(tmp_path / "out", again.draft_ids)
    ids = torch.arange(12).reshape(2, 6)
    tolerance = 0.0 if form == "own" else 0.02
    assert device.embed(ids).shape == target.embed(ids).shape
    torch.testing.assert_close(device.embed(ids), target.embed(ids), atol=tolerance, rtol=0)
    features = torch.randn(3, target.spec.hidden_size)
    found = again.draft_head(device).logits(features)
    torch.testing.assert_close(found, drafter.draft_head(target).logits(features))


@pytest.mark.parametrize("family", ["gemma3", "granite"])
def test_the_scales_of_a_family_are_kept(tmp_path: Path, family: str) -> None:
    target = TargetAdapter(tiny_family(family))
    drafter = tiny_drafter(target)
    export_device(drafter, target, TOKENIZER, tmp_path / "out", "own")
    device = read_device_target(tmp_path / "out", None)
    ids, features = torch.arange(9), torch.randn(3, target.spec.hidden_size)
    assert torch.equal(device.embed(ids), target.embed(ids))
    torch.testing.assert_close(device.logits(features), target.logits(features))


def test_the_layers_of_the_target_are_not_exported(tmp_path: Path) -> None:
    target = _target()
    drafter = tiny_drafter(target, tiny_settings(draft_vocab_size=20))
    export_device(drafter, target, TOKENIZER, tmp_path / "out")
    files = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", WEIGHTS_FILE} < files
    size = (tmp_path / "out" / WEIGHTS_FILE).stat().st_size
    hidden = target.spec.hidden_size
    assert size < len(TOKENIZER) * (64 + 2) + 20 * hidden * 4 + 1000
    device = read_device_target(tmp_path / "out", drafter.draft_ids, dtype=torch.bfloat16)
    assert device.embed(torch.arange(3)).dtype == device.head.weight.dtype == torch.bfloat16


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    target = _target()
    tail = tiny_drafter(target, tiny_settings(tail_layers=1, combine="sum", parallel_levels=0))
    with pytest.raises(ConfigError, match="the target's last layers"):
        export_device(tail, target, TOKENIZER, tmp_path / "out")
    with pytest.raises(TargetMismatch, match="fingerprint differs"):
        export_device(tiny_drafter(_target(seed=3)), target, TOKENIZER, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["weights", "version"])
def test_a_damaged_folder_is_named(tmp_path: Path, damage: str) -> None:
    target, folder = _target(), tmp_path / "out"
    export_device(tiny_drafter(target), target, TOKENIZER, folder)
    if damage == "weights":
        (folder / WEIGHTS_FILE).write_bytes(b"\0" * 20)
    else:
        known = json.loads((folder / DESCRIPTION_FILE).read_text())
        (folder / DESCRIPTION_FILE).write_text(json.dumps(known | {"version": 2}))
    with pytest.raises(CheckpointError, match="export the drafter again"):
        read_device_target(folder, None)
