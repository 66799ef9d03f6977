"""Runs refuse incomplete target states and those of other runs before creating a folder."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from helpers.target_states import offline_run, write_target_states
from helpers.training import tiny_run
from torch import nn
from transformers import AutoModelForCausalLM

from jakiro.errors import CheckpointError
from training.config import TrainSettings
from training.setup.preparation import prepare
from training.target_states.index import fingerprint_of
from training.target_states.store import open_target_states
from training.train import train

COMPLAINT = "do not belong to this run"


@pytest.fixture
def settings(workshop: Path) -> TrainSettings:
    """Return the settings of a run whose target states have been written."""
    settings = offline_run(workshop, steps=2)
    write_target_states(settings)
    return settings


def shards(settings: TrainSettings) -> list[Path]:
    assert settings.target_states.folder is not None
    return sorted(settings.target_states.folder.glob("*.safetensors"))


def refuse(settings: TrainSettings, message: str, model: Any = None) -> None:
    """Check that a run with these settings is refused before it begins."""
    with pytest.raises(CheckpointError, match=message):
        train(settings, model=model)
    assert not settings.run_folder.exists()


def test_available_states_are_read_and_otherwise_the_target_runs(
    settings: TrainSettings, workshop: Path
) -> None:
    folder = str(settings.target_states.folder)
    group = {"source": "available", "folder": folder, "dtype": "fp32"}
    some = tiny_run(workshop, steps=2, target_states=group)
    other = {"memory": {"source": "hidden", "layers": (1,)}}
    for drafter, is_stored in (({}, True), (other, False)):
        changed = tiny_run(workshop, steps=2, target_states=group, drafter=drafter)
        inputs = prepare(changed)
        assert (open_target_states(inputs) is not None) is is_stored
    shards(settings)[0].unlink()
    refuse(some, "incomplete or damaged")


def test_missing_or_incomplete_states_are_refused(settings: TrainSettings, workshop: Path) -> None:
    path = shards(settings)[1]
    content = path.read_bytes()
    path.unlink()
    refuse(settings, f"{path.name} is missing")
    path.write_bytes(content[:-8])
    refuse(settings, f"{path.name} is missing or does not have its full size")
    path.with_name("index.json").unlink()
    refuse(settings, "there is no index")


def test_target_states_of_other_sequences_are_refused(
    settings: TrainSettings, workshop: Path
) -> None:
    for changes in ({"sequence_length": 32}, {"validation_size": 1}, {"split": "never"}):
        refuse(offline_run(workshop, data=changes), rf"{COMPLAINT} \(packing differs\)")


def test_a_drafter_that_reads_more_of_its_target_is_refused(
    settings: TrainSettings, workshop: Path
) -> None:
    fused = offline_run(workshop, drafter={"trunk": {"kind": "hybrid", "fusion_layers": [1, 3]}})
    message = "lack states that this drafter reads.*expected: .*hidden.1.*write target states with"
    refuse(fused, message)


def test_one_changed_weight_makes_another_target(settings: TrainSettings, workshop: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(workshop / "target")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[40, 30] *= 1.001  # not in drafters' fingerprints
    refuse(settings, COMPLAINT + r" \(target_weights differs\)", model)


# PEFT uses a deprecated name of transformers: https://github.com/huggingface/peft
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_its_weights_and_its_scale_make_another_target(
    settings: TrainSettings, workshop: Path
) -> None:
    def adapted(alpha: int = 8) -> Any:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, lora_alpha=alpha, target_modules=["q_proj"])
        model = AutoModelForCausalLM.from_pretrained(workshop / "target")
        return peft.get_peft_model(model, config).eval()

    def of_run(model: Any) -> Any:
        return fingerprint_of(prepare(settings, model))

    scaled, changed = adapted(alpha=9), adapted()
    for name, weight in changed.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight)
    unchanged = of_run(adapted())
    assert fingerprint_of(prepare(settings)).target_weights != unchanged.target_weights
    assert of_run(adapted()) == unchanged
    assert unchanged.target_configuration != of_run(scaled).target_configuration
    assert unchanged.target_weights != of_run(changed).target_weights
