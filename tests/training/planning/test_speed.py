"""Runs are planned for a device of this machine, or elsewhere with a given amount of memory."""

from pathlib import Path

import pytest
import torch
from helpers.training import tiny_run

from jakiro.errors import ConfigError
from training.planning.estimate import estimate
from training.planning.speed import plan_device, present_device, product_rate


def test_a_machine_has_memory_and_speed(workshop: Path) -> None:
    settings = tiny_run(workshop, engine={"device": "cpu"})
    device = plan_device(settings)
    assert device.memory_for(2) * 2 == pytest.approx(device.memory_for(1), abs=2)
    assert product_rate(torch.device("cpu"), torch.float32) > 1e8


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests planning on a machine without a GPU")
def test_memory_of_a_device_elsewhere_is_that_of_a_gpu(workshop: Path) -> None:
    kinds = {
        device: plan_device(tiny_run(workshop, engine={"device": device}), 2**30)
        for device in ("auto", "cpu", "cuda")
    }
    assert [planned.kind for planned in kinds.values()] == ["cuda", "cpu", "cuda"]
    assert [planned.is_here for planned in kinds.values()] == [False, True, False]
    assert all(planned.memory_for(2) == 2**30 for planned in kinds.values())
    assert kinds["auto"].product_rate(tiny_run(workshop)) is None
    assert plan_device(tiny_run(workshop)).kind == "cpu"
    on_gpu = tiny_run(workshop, engine={"device": "cuda"})
    with pytest.raises(ConfigError, match=r"be planned; .* got: torch 2.*; remedy: pass --device"):
        plan_device(on_gpu)
    with pytest.raises(ConfigError, match=r"no GPU that torch can use; .* got: torch 2"):
        present_device(on_gpu, 2**30)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_buffers_are_those_of_the_device_that_is_planned_for(workshop: Path, stage: int) -> None:
    settings = tiny_run(workshop, engine={"zero_stage": stage})
    here, there = (estimate(settings, 1, kind).states for kind in ("cpu", "cuda"))
    # DeepSpeed's buffers have 500 million elements by default; a GPU allocates all of them.
    assert there.buffers - here.buffers == 4 * (500_000_000 - estimate(settings, 1).parameters)
    assert (there.parameters, there.optimizer) == (here.parameters, here.optimizer)
