"""The processes of a run learn of each other's errors, and stop with errors that name remedies."""

from pathlib import Path

import pytest
import torch
from helpers.processes import start_training
from helpers.training import TEXTS, tiny_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from jakiro.errors import NumericalError, ResourceError
from training import processes
from training.processes import explain_exhaustion, join_processes, launch_environment
from training.train import train


def test_a_gpu_is_the_current_device_before_the_processes_talk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    with launch_environment("cpu"):
        monkeypatch.setattr(processes, "choose_device", lambda _: torch.device("cuda", 1))
        with join_processes("auto") as joined:
            assert [joined.device] == chosen == [torch.device("cuda", 1)]


def spoil_target(folder: Path) -> None:
    """Make the target compute NaN for the first text, at a token that no other text contains."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    first, *others = (set(tokenizer(text)["input_ids"]) for text in TEXTS)
    token = min(first.difference(*others))
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = float("nan")
    model.save_pretrained(folder)


def test_a_loss_that_is_not_finite_stops_the_run_before_the_next_checkpoint(
    workshop: Path,
) -> None:
    settings = tiny_run(
        workshop,
        optimizer={"learning_rate": 1e30, "max_grad_norm": 0.0, "warmup_steps": 4},
        checkpoint={"every": 1},
        evaluation={"num_prompts": 0},
    )
    with pytest.raises(
        NumericalError, match=r"the (loss|gradient) of step \d+ is not finite"
    ) as caught:
        train(settings)
    kept = sorted((settings.run_folder / "checkpoints").glob("step-*"))
    assert not kept or str(kept[-1]) in str(caught.value)
    assert not settings.run_folder.joinpath("drafter").exists()


@pytest.mark.slow
def test_two_processes_stop_if_a_loss_of_one_is_not_finite(workshop: Path) -> None:
    spoil_target(workshop / "target")
    settings = tiny_run(workshop, batch={"micro_batch_size": 1}, data={"validation_size": 0})
    trainees = start_training(settings, workshop, num_processes=2)
    assert [trainee.end() for trainee in trainees] == [2, 2]
    first, second = (trainee.errors for trainee in trainees)
    *_, last = first.strip().splitlines()
    assert last.startswith("error: the loss of step ")
    assert "last good checkpoint: none yet" in last
    assert "error: " not in second
    assert "Traceback" not in first + second


def test_a_failed_allocation_names_the_settings_to_lower() -> None:
    remedy = "batch.micro_batch_size"
    with pytest.raises(ResourceError, match=remedy), explain_exhaustion():
        torch.empty(1 << 50, dtype=torch.uint8)
