"""The DeepSpeed engine holds only the drafter, with options that follow from the settings."""

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from helpers.interruptions import PowerCutError, interrupt_after
from helpers.training import TinyTraining, batch_for, tiny_run, tiny_training
from helpers.variants import VARIANTS
from torch import Tensor

from training.loop.metrics import read_metrics
from training.loop.trainer import build_deepspeed_config
from training.module import TrainingModule
from training.train import train


@pytest.mark.parametrize(
    ("engine", "zero"),
    [
        ({}, {"stage": 0}),
        ({"dtype": "bf16"}, {"stage": 1}),
        ({"zero_stage": 1, "offload_optimizer": True}, {"stage": 1, "offload_optimizer": "cpu"}),
        ({"zero_stage": 3, "offload_parameters": True}, {"stage": 3, "offload_param": "cpu"}),
    ],
)
def test_deepspeed_offloads_as_the_settings_say(
    workshop: Path, engine: dict[str, Any], zero: dict[str, Any]
) -> None:
    settings = tiny_run(workshop, engine=engine | {"device": "cpu"})
    options = build_deepspeed_config(settings, num_processes=1)["zero_optimization"]
    assert {name: at["device"] if name != "stage" else at for name, at in options.items()} == zero


@pytest.mark.slow
def test_an_overflow_in_fp16_is_a_skipped_step_and_the_scale_survives_an_interruption(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Torch computes in fp16 on any processor; DeepSpeed accepts only those where fp16 is fast.
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    changes: dict[str, Any] = {
        "engine": {"dtype": "fp16", "device": "cpu"},
        "objective": {"token_weight": 100.0},
        "checkpoint": {"every": 7},
    }
    whole = tiny_run(workshop, **changes, run_folder=str(workshop / "whole"))
    train(whole)
    lines = [line for line in read_metrics(whole.run_folder) if "loss" in line]
    skipped = [line["gradient_norm"] is None for line in lines]
    assert skipped[0]
    assert not skipped[-1]
    assert lines[-1]["loss_scale"] < lines[0]["loss_scale"]
    halved = tiny_run(workshop, **changes)
    with monkeypatch.context() as patched:
        interrupt_after(patched, step=7)
        with pytest.raises(PowerCutError):
            train(halved)
    train(halved)
    for name in ("loss", "gradient_norm", "loss_scale"):
        again = [line[name] for line in read_metrics(halved.run_folder) if "loss" in line]
        assert again == [line[name] for line in lines]


def saved_and_gradients(
    tiny: TinyTraining, batch: Any, recompute: bool
) -> tuple[int, Tensor, list[Tensor]]:
    """Return the bytes kept for the backward pass, the loss, and every parameter's gradient."""
    seen: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        seen[tensor.data_ptr()] = tensor.nbytes
        return tensor

    reader = tiny.reader(batch.token_ids.shape[1])
    view = reader.view(batch)
    module = TrainingModule(tiny.drafter, tiny.objective, recompute)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        total = module(view, batch, reader).total
    return sum(seen.values()), total.detach(), tiny.gradients(total)


@pytest.mark.parametrize("name", ["E2-mixture-P2", "feedback-mixture-P2", "hybrid-tail-1"])
def test_activations_computed_again_give_the_same_gradients(name: str) -> None:
    tiny = tiny_training(VARIANTS[name])
    batch = batch_for(VARIANTS[name], (9, 7), (16,))
    kept, loss, gradients = saved_and_gradients(tiny, batch, recompute=False)
    again, same_loss, same_gradients = saved_and_gradients(tiny, batch, recompute=True)
    assert again < 0.8 * kept
    assert torch.equal(loss, same_loss)
    for one, other in zip(gradients, same_gradients, strict=True):
        torch.testing.assert_close(one, other)
