"""Runs check that their drafter can be saved, loaded and used, and keep the best drafter."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import tiny_llama, tiny_settings
from helpers.training import tiny_run
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from jakiro.config import JakiroConfig, config_for
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter
from jakiro.target.record import record_target
from training.config import TrainSettings
from training.loop.export import model_card
from training.train import train

DECODING = {
    "tau": 1.5,
    "prompts": 2,
    "temperature": 0.0,
    "conditional_acceptance_rate": [0.5],
    "tokens": 9,
}


AGREEMENT = "training.evaluation.Evaluation.measure"
EVERY_STEP: dict[str, Any] = {"every": 1, "num_prompts": 0}


def _measure(monkeypatch: pytest.MonkeyPatch, *agreements: float) -> None:
    """Make evaluations report these agreements with the target, one after the other."""
    values = iter(agreements)

    def measure(*_: Any) -> dict[str, Any]:
        agreement = next(values)
        return {
            "validation": {"levels": [{"agreement": agreement}], "positions": 9},
            "decoding": [DECODING | {"tau": 1 + agreement}],
        }

    monkeypatch.setattr(AGREEMENT, measure)


def _finished_step(settings: TrainSettings) -> int:
    """Return the number of optimizer steps of the finished drafter."""
    record = JakiroDrafter.from_pretrained(settings.run_folder / "drafter").config.record
    assert record is not None
    return int(record["training"]["step"])


@pytest.mark.parametrize(
    ("agreements", "checkpoint", "expected"),
    [
        ((0.3, 0.2, 0.1, 0.25), {}, 0),
        ((0.3, 0.2, 0.1, 0.35), {}, 3),
        ((0.3, 0.2, 0.1, 0.25), {"keep_best": False}, 3),
    ],
)
def test_a_run_ends_with_the_drafter_of_the_highest_held_out_agreement(
    workshop: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    agreements: tuple[float, ...],
    checkpoint: dict[str, Any],
    expected: int,
) -> None:
    _measure(monkeypatch, *agreements)
    settings = tiny_run(workshop, steps=3, evaluation=EVERY_STEP, checkpoint=checkpoint)
    with caplog.at_level("INFO"):
        train(settings)
    assert _finished_step(settings) == expected
    last = caplog.records[-1].message
    assert "the last drafter, after 3 steps (held-out agreement" in last
    if expected < 3:
        best = f"the best drafter of the run, after {expected} steps (held-out agreement"
        tau = f"tau {1 + agreements[expected]:.2f}"
        assert f"{best} {agreements[expected]:.1%}, {tau})" in last
        kept = (settings.run_folder / "best" / "model.safetensors").read_bytes()
        assert (settings.run_folder / "drafter" / "model.safetensors").read_bytes() == kept


def test_a_run_that_ends_early_with_adapters_keeps_those_of_its_best_drafter(
    trained_workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = shutil.copytree(trained_workshop / "run" / "drafter", trained_workshop / "start")
    _measure(monkeypatch, 0.1, 0.4, 0.3, 0.2)
    settings = tiny_run(
        trained_workshop,
        steps=3,
        evaluation=EVERY_STEP,
        lora={"rank": 2},
        initialize={"drafter": str(start)},
        run_folder=str(trained_workshop / "adapted"),
    )
    folder = train(settings)
    assert _finished_step(settings) == 1
    adapters = load_file(folder.parent / "adapter" / "adapter_model.safetensors")
    kept = load_file(folder.parent / "best" / "adapter" / "adapter_model.safetensors")
    assert not (folder / "adapter").exists()
    assert adapters.keys() == kept.keys()
    assert all(torch.equal(part, kept[name]) for name, part in adapters.items())


def test_prompts_that_are_decoded_do_not_change_the_saved_weights(workshop: Path) -> None:
    saved = []
    for num_prompts in (0, 1):
        settings = tiny_run(
            workshop,
            steps=2,
            target={"dtype": "bf16"},
            evaluation={"num_prompts": num_prompts},
            run_folder=str(workshop / f"run-{num_prompts}"),
        )
        saved.append(load_file(train(settings) / "model.safetensors"))
    assert {weight.dtype for weight in saved[1].values()} == {torch.float32}
    assert all(torch.equal(weight, saved[1][name]) for name, weight in saved[0].items())


MEASURED = {
    "temperature": 0.0,
    "tau": 2.345,
    "conditional_acceptance_rate": [0.71, 0.5],
    "prompts": 8,
    "tokens": 512,
}
HELD_OUT = {
    "positions": 900,
    "levels": [{"agreement": 0.4321}],
    "accept_rate": [0.75, 0.5],
    "tau_probabilistic": 2.125,
}


def _config(
    evaluation: dict[str, Any], target: str = "org/target", **settings: Any
) -> JakiroConfig:
    """Return the config of a finished drafter."""
    full = TrainSettings.model_validate(
        {
            "target": {"name_or_path": target},
            "data": {"paths": ["org/chats:train"]},
            "drafter": {"experts": {"num_experts": 2}},
            **settings,
        }
    )
    record = record_target(TargetAdapter(tiny_llama()).spec, target)
    config = config_for(tiny_settings(), record)
    config.record = {
        "settings": full.model_dump(mode="json"),
        "training": {"step": 40, "tokens": 123_456},
        "evaluation": evaluation,
        "provenance": {
            "git": {"sha": "abc123", "is_dirty": True},
            "versions": {"torch": "2.13"},
            "time": "2026-01-01T00:00:00+00:00",
            "hardware": "NVIDIA X",
        },
    }
    return config


def test_the_card_has_target_data_and_measurements() -> None:
    text = model_card(_config({"decoding": [MEASURED], "validation": HELD_OUT}))
    data = ModelCard(text).data
    assert (data.base_model, data.library_name) == ("org/target", "jakiro")
    assert data.datasets == ["org/chats"]
    assert "speculative-decoding" in data.tags
    for phrase in (
        "| 0 | 2.35 | 0.71, 0.50 | 512 |",
        "8 prompts (the starts of held-out records)",
        "In 43.2% of 900 drafts",
        "40 optimizer steps over 123,456 tokens of `org/chats:train`.",
        "commit abc123 with local changes",
        "torch 2.13",
        "Hardware: NVIDIA X.",
        "drafts before are accepted: 0.75, 0.50 (2.12 tokens per step of a chain).",
        "num_experts: 2",
    ):
        assert phrase in text, phrase


def test_the_card_names_no_folder_of_the_machine() -> None:
    changes: dict[str, Any] = {
        "data": {"paths": ["/folder/of/someone/chats.jsonl"]},
        "initialize": {"drafter": "/folder/of/someone/base"},
        "lora": {"rank": 4},
    }
    text = model_card(_config({}, target="/folder/of/someone/target", **changes))
    data = ModelCard(text).data
    assert data.base_model is data.datasets is None
    assert "Tau was not measured" in text
    assert "someone" not in text
    assert "the drafter `base`; only adapters were trained" in text
    assert "rank: 4" in text
