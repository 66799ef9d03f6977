"""Two processes train like one with any ZeRO stage, and end with their launcher."""

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from helpers.processes import train_in_processes
from helpers.training import tiny_run

from jakiro.drafter import JakiroDrafter
from jakiro.errors import EXIT_CODE_INTERRUPTED, ConfigError
from training.config import TrainSettings
from training.launch import LaunchOptions, command
from training.launch import launch as launch_here
from training.loop.metrics import read_metrics
from training.train import train

pytestmark = pytest.mark.distributed

# Sequences differ in their number of positions with a loss, so the processes do, too.
SHORT: dict[str, Any] = {"steps": 6, "batch": {"micro_batch_size": 1}}


def record_of(settings: TrainSettings) -> dict[str, Any]:
    return JakiroDrafter.from_pretrained(settings.run_folder / "drafter").config.record


def assert_same_run(one: TrainSettings, other: TrainSettings) -> None:
    """Check that two runs have the same losses, evaluations and drafters, up to rounding."""
    metrics = [
        [line for line in read_metrics(run.run_folder) if "loss" in line] for run in (one, other)
    ]
    for a, b in zip(*metrics, strict=True):
        assert a["positions"] == b["positions"]
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)
        assert a["gradient_norm"] == pytest.approx(b["gradient_norm"], rel=1e-3)
    drafters = [JakiroDrafter.from_pretrained(run.run_folder / "drafter") for run in (one, other)]
    for a, b in zip(*(drafter.parameters() for drafter in drafters), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-3)
    evaluations = [record_of(run)["evaluation"] for run in (one, other)]
    assert evaluations[0]["validation"]["loss"] == pytest.approx(
        evaluations[1]["validation"]["loss"], abs=1e-3
    )
    assert evaluations[0]["decoding"][0]["tokens"] == evaluations[1]["decoding"][0]["tokens"]


@pytest.fixture(scope="module")
def alone(_workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainSettings:
    """Return the settings of a finished run of one process, with the default engine settings."""
    folder = shutil.copytree(_workshop, tmp_path_factory.mktemp("alone") / "workshop")
    settings = tiny_run(folder, **SHORT)
    train(settings)
    return settings


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [
        {"zero_stage": 0, "activation_checkpointing": True},
        {"zero_stage": 1},
        {"zero_stage": 2, "offload_optimizer": True},
        pytest.param({"zero_stage": 3}, marks=pytest.mark.slow),
        {
            **{"zero_stage": 3, "activation_checkpointing": True},
            **{"offload_optimizer": True, "offload_parameters": True},
        },
    ],
    ids=lambda engine: "-".join(map(str, engine.values())),
)
def test_two_processes_train_like_one(
    workshop: Path, alone: TrainSettings, engine: dict[str, Any]
) -> None:
    shared = tiny_run(workshop, **SHORT, engine=engine)
    train_in_processes(shared, workshop, num_processes=2)
    assert_same_run(alone, shared)


WAITING = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(7))
print("waiting", flush=True)
time.sleep(60)
"""


def _launch_waiting(output: int) -> None:
    """Launch a process that waits, with its output redirected to a file descriptor."""
    os.dup2(output, 1)
    settings = TrainSettings.model_validate(
        {"target": {"name_or_path": "x"}, "data": {"paths": ["x"]}}
    )
    sys.exit(launch_here([sys.executable, "-c", WAITING], settings))


# The test forks, because this process has all imports; no other thread of it holds a lock.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_request_to_terminate_reaches_the_launched_process() -> None:
    readable, writable = os.pipe()
    started = get_context("fork").Process(target=_launch_waiting, args=(writable,))
    started.start()
    os.close(writable)
    with os.fdopen(readable) as lines:
        assert lines.readline() == "waiting\n"
    started.terminate()
    started.join(timeout=30)
    assert started.exitcode == EXIT_CODE_INTERRUPTED


def test_a_launch_takes_the_first_of_the_visible_gpus(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,7")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings = tiny_run(workshop, engine={"device": "cuda"})
    words = command(settings, Path("run.yaml"), (), LaunchOptions(processes=2))
    world = words[words.index("--world_info") + 1]
    assert json.loads(base64.urlsafe_b64decode(world)) == {"localhost": ["2", "5"]}
    with pytest.raises(ConfigError, match="more processes than GPUs"):
        command(settings, Path("run.yaml"), (), LaunchOptions(processes=4))


SECONDS = 20.0
CHILD = """
import os, signal
from training.launch import end_with_parent
assert end_with_parent() == os.getppid()
print(os.getpid(), flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the signal")
def test_a_stopped_process_ends_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(SECONDS)
    parent.stdout.close()
    end = time.monotonic() + SECONDS
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.01)
