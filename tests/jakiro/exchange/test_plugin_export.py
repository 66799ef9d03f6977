"""A drafter that was exported for the plug-in can be imported again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.imports import converted
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.variants import FEEDBACK, FUSED, NO_FIRST, OWN, WIDE
from safetensors.torch import load_file, save_file

from jakiro.errors import CheckpointError, TargetMismatch
from jakiro.exchange.checkpoint import read_checkpoint
from jakiro.exchange.families import plan_import
from jakiro.exchange.vllm_export import export_vllm
from jakiro.exchange.writing import write_export
from jakiro.target.adapter import TargetAdapter

FORMS: dict[str, dict[str, Any]] = {
    "feedback": {"trunk": FEEDBACK | NO_FIRST, "draft_vocab_size": 23},
    "fused": {"trunk": FUSED | NO_FIRST, "combine": "sum", "parallel_levels": 2},
    "eagle3": {"trunk": WIDE, "draft_vocab_size": 23, **OWN},
    "hybrid": {"trunk": {"kind": "hybrid"} | NO_FIRST},
    "moa": {"trunk": {"mlp_width": 20} | NO_FIRST, "source": "hidden", "rope_theta": 50.0},
}


def _exported(name: str, folder: Path) -> tuple[Any, Any]:
    model = tiny_llama()
    target = TargetAdapter(model)
    drafter = tiny_drafter(target, tiny_settings(**FORMS[name]))
    if drafter.draft_ids is not None:
        drafter.draft_ids.copy_(2 * torch.arange(23) + 3)
    exported = export_vllm(drafter, target)
    write_export(exported.weights, exported.config, folder)
    return model, drafter


@pytest.mark.parametrize("name", FORMS)
def test_importing_an_export_gives_the_same_tensors_and_settings(name: str, tmp_path: Path) -> None:
    model, drafter = _exported(name, tmp_path / "exported")
    again = converted(tmp_path / "exported", model)
    before, after = drafter.state_dict(), again.state_dict()
    assert before.keys() - after.keys() <= {"experts.level_down", "experts.beta"}
    for key, part in after.items():
        assert torch.equal(part, before[key][: len(part)]), key
        if "router" not in key:  # further rows are for parallel levels
            assert part.shape == before[key].shape, key
    settings = drafter.config.settings
    schedule = settings.schedule.model_copy(update={"parallel_levels": 0})
    assert again.config.settings == settings.model_copy(update={"schedule": schedule})


def test_another_target_and_damaged_exports_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    _exported("hybrid", folder)
    with pytest.raises(TargetMismatch, match="fingerprint differs"):
        converted(folder, tiny_llama(seed=7))
    config = json.loads((folder / "config.json").read_text())
    damaged = config | {"jakiro": config["jakiro"] | {"target": None}}
    (folder / "config.json").write_text(json.dumps(damaged))
    with pytest.raises(CheckpointError, match="the config that `jakiro export` wrote"):
        plan_import(read_checkpoint(folder))
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    for changed in ({"other": torch.zeros(2)}, {"experts.down": torch.zeros(2)}):
        save_file(weights | changed, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=next(iter(changed)).replace(".", r"\.")):
            plan_import(read_checkpoint(folder))


def test_a_draft_vocabulary_that_was_shifted_or_permuted_is_refused(tmp_path: Path) -> None:
    _exported("feedback", tmp_path / "exported")
    file = tmp_path / "exported" / "model.safetensors"
    weights = load_file(file)
    ids = weights["draft_ids"]
    for wrong in (ids + 1, ids.roll(1), ids.flip(0)):
        save_file(weights | {"draft_ids": wrong.contiguous()}, file)
        with pytest.raises(CheckpointError, match="draft_ids as they were exported"):
            plan_import(read_checkpoint(tmp_path / "exported"))
