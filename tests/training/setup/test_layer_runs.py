"""Runs whose drafter starts as a layer of the target: families, processes, interruptions."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import tiny_family
from helpers.interruptions import PowerCutError, interrupt_after
from helpers.models import tiny_drafter, tiny_settings
from helpers.processes import train_in_processes
from helpers.training import TinyTraining, batch_for, tiny_run

from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter
from training.config import TrainSettings
from training.loop.metrics import read_metrics
from training.loss.settings import ObjectiveSettings
from training.setup.initialization import initialize
from training.train import train

HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}  # as in the tiny targets
STARTS = "the drafter starts as layer"


def fitted_run(folder: Path, **changes: Any) -> TrainSettings:
    """Return the settings of a run whose drafter starts as a layer of the target."""
    return tiny_run(
        folder,
        **{
            "drafter": {"trunk": {"kind": "hybrid", **HEADS}},
            "initialize": {"attention_layer": "auto", "fit_tokens": 300},
            "steps": 2,
            "checkpoint": {"every": 1},
            "evaluation": {"num_prompts": 0},
            **changes,
        },
    )


def _loss_at_the_start(target: TargetAdapter, folder: Path, fit_tokens: int) -> float:
    drafter = tiny_settings(trunk={"kind": "hybrid", **dict.fromkeys(HEADS)})
    batches = [batch_for(drafter, (24,), (10, 14), seed=seed) for seed in range(12)]
    settings = fitted_run(folder).model_copy(update={"drafter": drafter})
    tiny = TinyTraining(tiny_drafter(target, drafter), target, ObjectiveSettings())
    initialize(tiny.drafter, settings, target, batches=batches if fit_tokens else None)
    unseen = batch_for(drafter, (24,), (10, 14), seed=99)
    return float(tiny.loss(unseen).total.detach())


# Families in `make test`, one per mechanism; the slow ones combine several, or are like Llama.
QUICK_FAMILIES = [
    "llama, wide heads",
    "qwen2",  # biases
    "gemma3",  # norms of heads, after attention and after the feed-forward part
    "olmo2",  # no norm before attention
    "starcoder2",  # a different feed-forward part
    "cohere",  # attention and feed-forward part in parallel
]
SLOW_FAMILIES = [
    *("llama, tied", "ministral", "qwen3", "granite", "glm4", "gpt_oss"),
    "mixtral",  # experts in the target
]


@pytest.mark.parametrize(
    "family",
    [
        *QUICK_FAMILIES,
        *(pytest.param(family, marks=pytest.mark.slow) for family in SLOW_FAMILIES),
    ],
)
def test_in_any_family_a_fitted_drafter_is_nearer_than_with_attention_alone(
    family: str, workshop: Path
) -> None:
    target = TargetAdapter(tiny_family(family).requires_grad_(False))
    losses = [_loss_at_the_start(target, workshop, fit_tokens) for fit_tokens in (0, 300)]
    assert losses[1] < 0.8 * losses[0]


def _first_loss(settings: TrainSettings) -> float:
    return float(next(line["loss"] for line in read_metrics(settings.run_folder) if "loss" in line))


@pytest.fixture(scope="module")
def alone(_workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainSettings:
    """Return the settings of a finished, uninterrupted run of one process."""
    folder = shutil.copytree(_workshop, tmp_path_factory.mktemp("alone") / "workshop")
    settings = fitted_run(folder)
    train(settings)
    return settings


def _assert_same_drafter(one: TrainSettings, other: TrainSettings, **tolerance: float) -> None:
    assert _first_loss(one) == pytest.approx(_first_loss(other), rel=1e-5)
    states = [JakiroDrafter.from_pretrained(run.run_folder / "drafter") for run in (one, other)]
    torch.testing.assert_close(*(drafter.state_dict() for drafter in states), **tolerance)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("zero_stage", [0, 3])
def test_two_processes_start_with_the_weights_of_one(
    zero_stage: int, workshop: Path, alone: TrainSettings
) -> None:
    changes: dict[str, Any] = {
        "batch": {"micro_batch_size": 1},
        "engine": {"zero_stage": zero_stage},
    }
    shared = fitted_run(workshop, **changes)
    train_in_processes(shared, workshop, num_processes=2)
    _assert_same_drafter(alone, shared, rtol=0, atol=1e-3)
    output = (workshop / "output-0.txt").read_text() + (workshop / "output-1.txt").read_text()
    assert output.count(STARTS) == 1


def test_a_run_that_is_stopped_after_a_checkpoint_is_not_fitted_again(
    workshop: Path,
    alone: TrainSettings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    halved = fitted_run(workshop)
    with caplog.at_level(logging.INFO):
        with monkeypatch.context() as patched:
            interrupt_after(patched, step=1)
            with pytest.raises(PowerCutError):
                train(halved)
        train(halved)
    assert caplog.text.count(STARTS) == 1
    _assert_same_drafter(alone, halved, rtol=0, atol=0)
