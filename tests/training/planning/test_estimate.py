"""Estimates of memory, disk and operations agree with real runs."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama
from helpers.training import ROLLED_OUT, random_batch, tiny_run
from transformers import AutoModelForCausalLM

from jakiro.errors import ConfigError
from jakiro.target.adapter import TargetAdapter
from training.config import TrainSettings, anchor_rule
from training.module import TargetReader, TrainingModule
from training.planning.estimate import (
    choose_micro_batch,
    estimate,
    render,
)
from training.planning.memory import simulate, target_on_meta
from training.train import train

CONFIGS = Path(__file__).parents[3] / "configs"
PROCESS = Path("/proc/self")
LENGTH = 192
FACTOR = 2.0  # largest factor between the estimated and the measured peak, either way


def give_back_free_memory() -> None:
    """Return unused memory to the system, if the C library can do that."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def wide_run(folder: Path, **changes: Any) -> TrainSettings:
    """Return the settings of a run whose activations take most of the memory."""
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "max_position_embeddings": 512}
    tiny_llama(vocab=4000, **sizes).save_pretrained(folder / "target")
    base: dict[str, Any] = {
        "data": {"sequence_length": LENGTH},
        "batch": {"global_batch_size": 4, "micro_batch_size": 4},
    }
    return tiny_run(folder, **(base | changes))


def _peak_of(work: Callable[[], None]) -> int:
    """Return the peak number of bytes that `work` needs beyond those already in use."""
    give_back_free_memory()
    try:
        (PROCESS / "clear_refs").write_text("5")  # see proc_pid_clear_refs(5)
    except OSError:
        pytest.skip("this system does not report peak memory")
    before = _peak()
    work()
    return _peak() - before


def _peak() -> int:
    lines = (PROCESS / "status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"objective": {"chunk_size": 2048}}, marks=pytest.mark.slow),
        pytest.param({"objective": {"chunk_size": 128}}, marks=pytest.mark.slow),
        pytest.param(
            {"drafter": {"trunk": {"kind": "feedback", "ttt_steps": ROLLED_OUT}}},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["all at once", "in chunks", "rolled out"],
)
def test_the_estimate_of_activations_is_close_to_the_measured_memory(
    workshop: Path, changes: dict[str, Any]
) -> None:
    settings = wide_run(workshop, **changes)
    target = TargetAdapter(AutoModelForCausalLM.from_pretrained(workshop / "target"))
    target.model.requires_grad_(False)
    drafter = tiny_drafter(target, settings.drafter)
    module = TrainingModule(drafter, settings.objective)
    samples = anchor_rule(settings).num_samples
    batch = random_batch(*[[LENGTH]] * 4, sequence_length=LENGTH, samples=samples, vocab=4000)

    def work() -> None:
        reader = TargetReader(target, drafter, LENGTH, torch.float32)
        module(reader.view(batch), batch, reader).total.backward()

    work()  # so that memory that is allocated only once is not counted
    # Other allocations of the process can only increase a measurement, so the smallest counts.
    measured = min(_peak_of(work) for _ in range(3))
    simulated = simulate(settings, target_on_meta(settings.target))
    ratio = (simulated.target_states + simulated.activations) / measured
    assert 1 / FACTOR < ratio < FACTOR, ratio


def test_operations_are_mostly_matrix_products(workshop: Path) -> None:
    settings = tiny_run(workshop)
    target = target_on_meta(settings.target)
    one, two = (
        simulate(tiny_run(workshop, batch={"micro_batch_size": size}), target) for size in (1, 2)
    )
    assert two.target_flops == 2 * one.target_flops
    matrices = [p for p in target.decoder.parameters() if p.ndim == 2][1:]  # without the embeddings
    products = 2 * settings.data.sequence_length * sum(p.numel() for p in matrices)
    assert products < one.target_flops < 2 * products  # attention scores are extra


@pytest.mark.slow
def test_disk_holds_the_drafter_and_its_checkpoints(workshop: Path) -> None:
    changes = {"checkpoint": {"every": 2, "keep": 5}, "evaluation": {"num_prompts": 0}}
    settings = tiny_run(workshop, steps=5, **changes)
    train(settings)
    files = [
        path for path in settings.run_folder.rglob("*") if path.suffix in (".safetensors", ".pt")
    ]
    written = sum(path.stat().st_size for path in files)
    assert estimate(settings, 1).disk_bytes == pytest.approx(written, rel=0.15)


@pytest.mark.slow
def test_only_adapters_need_gradients_and_optimizer_states(workshop: Path) -> None:
    start = {"initialize": {"drafter": "any"}}
    lora = start | {"lora": {"rank": 2}, "run_folder": str(workshop / "adapted")}
    whole, adapted = (estimate(tiny_run(workshop, **changes), 1) for changes in ({}, lora))
    assert adapted.frozen == whole.parameters > adapted.parameters
    assert adapted.states.gradients == adapted.states.optimizer // 2 == 4 * adapted.parameters
    assert adapted.states.parameters == 4 * (adapted.frozen + adapted.parameters)
    assert "frozen" in str(list(render(adapted, 2**30, 1e12).columns[0].cells))
    shared = tiny_run(workshop, **lora, engine={"zero_stage": 2, "dtype": "bf16"})
    assert estimate(shared, 1).states.parameters == pytest.approx(
        2 * (adapted.frozen + adapted.parameters), abs=100
    )


@pytest.mark.slow
def test_the_largest_micro_batch_that_fits_is_chosen(workshop: Path) -> None:
    settings = tiny_run(workshop, batch={"global_batch_size": 12, "micro_batch_size": 12})
    needed = {
        size: estimate(
            tiny_run(workshop, batch={"global_batch_size": 12, "micro_batch_size": size}), 1
        ).device_bytes
        for size in (1, 2, 3, 4, 6, 12)
    }
    assert list(needed.values()) == sorted(needed.values())
    for size in (1, 3, 12):
        memory = int(needed[size] / 0.9) + 10
        assert choose_micro_batch(settings, 1, memory).batch.micro_batch_size == size
    assert choose_micro_batch(settings, 6, 2**40).batch.micro_batch_size == 2
    with pytest.raises(ConfigError, match="a micro-batch of one sequence does not fit"):
        choose_micro_batch(settings, 1, needed[1] // 2)
