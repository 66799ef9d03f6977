"""Runs in processes that are killed or fill the disk lose only the steps after a checkpoint."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any

import psutil
import pytest
import torch
from helpers.processes import start_training, train_in_processes
from helpers.training import tiny_run
from safetensors.torch import load_file

from jakiro.errors import EXIT_CODE_BAD_INPUT, EXIT_CODE_INTERRUPTED
from jakiro.utils.settings import dump_settings
from training.config import TrainSettings
from training.loop.metrics import read_metrics
from training.processes import Interruption, Processes

pytestmark = pytest.mark.distributed

# Checkpoints and evaluations have different intervals; evaluations keep the best drafter.
RUN: dict[str, Any] = {
    "steps": 8,
    "checkpoint": {"every": 3},
    "evaluation": {"every": 4, "num_prompts": 1, "max_new_tokens": 4},
}
ALONE = Processes(0, 1, torch.device("cpu"))
LONG = RUN | {"steps": 16}

# Paths that exist only while a checkpoint or a drafter is written or removed.
WRITTEN = (
    "checkpoints/.partial",
    "checkpoints/.partial/weight.safetensors",
    "checkpoints/.partial/exp_avg_sq.safetensors",
    "checkpoints/.removed",
    ".drafter.partial",
)


@pytest.fixture(scope="module")
def whole(_workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainSettings:
    """Return the settings of a finished, uninterrupted run."""
    return finished_run(_workshop, tmp_path_factory, RUN)


def finished_run(
    workshop: Path,
    tmp_path_factory: pytest.TempPathFactory,
    changes: dict[str, Any],
    num_processes: int = 1,
) -> TrainSettings:
    folder = shutil.copytree(workshop, tmp_path_factory.mktemp("whole") / "workshop")
    settings = tiny_run(folder, **changes)
    train_in_processes(settings, folder, num_processes)
    return settings


def records(settings: TrainSettings) -> list[dict[str, Any]]:
    """Return the recorded lines of a run, without their speeds and without repetitions.

    A run that is killed after its last evaluation repeats this evaluation.
    """
    lines = read_metrics(settings.run_folder)
    known = [{key: line[key] for key in line if key != "tokens_per_second"} for line in lines]
    return [line for number, line in enumerate(known) if line not in known[:number]]


def weights(folder: Path) -> dict[str, Any]:
    return {name: part.tolist() for name, part in load_file(folder / "model.safetensors").items()}


def assert_same(one: TrainSettings, other: TrainSettings) -> None:
    """Check that records, drafters and best drafters are equal bit by bit."""
    assert records(one) == records(other)
    for name in ("drafter", "best"):
        assert weights(one.run_folder / name) == weights(other.run_folder / name)


def reaches(settings: TrainSettings, line: int) -> Callable[[], bool]:
    """Return a function that tests whether at least `line` lines are recorded."""
    path = settings.run_folder / "metrics.jsonl"
    return lambda: path.exists() and path.read_bytes().count(b"\n") >= line


def writes(settings: TrainSettings, name: str, after: int) -> Callable[[], bool]:
    """Return a function that tests whether `after` lines are recorded and a path exists."""
    is_reached = reaches(settings, after)
    return lambda: is_reached() and (settings.run_folder / name).exists()


def kill(settings: TrainSettings, workshop: Path, is_time: Callable[[], bool]) -> bool:
    (trainee,) = start_training(settings, workshop)
    return trainee.kill_when(is_time)


def test_an_interrupted_run_saves_its_last_step_and_ends_like_an_uninterrupted_run(
    workshop: Path, whole: TrainSettings
) -> None:
    settings = tiny_run(workshop, **RUN | {"checkpoint": {"every": 1000}})
    (trainee,) = start_training(settings, workshop)
    assert trainee.signal_when(reaches(settings, 3), signal.SIGINT)
    assert trainee.end() == EXIT_CODE_INTERRUPTED
    assert "press Ctrl-C again to end it at once" in trainee.errors
    printed = " ".join(trainee.errors.split())
    assert re.search(r"saved the run after step \d+ of 8; the same command resumes it", printed)
    num_steps = max(record["step"] for record in records(settings))
    assert list(settings.run_folder.glob(f"checkpoints/*{num_steps}"))
    train_in_processes(settings, workshop)
    assert_same(whole, settings)


@pytest.mark.slow
def test_a_signal_to_one_process_saves_the_run_of_all_processes(workshop: Path) -> None:
    settings = tiny_run(
        workshop, steps=100, batch={"micro_batch_size": 1}, checkpoint={"every": 1000}
    )
    first, second = start_training(settings, workshop, num_processes=2)
    assert second.signal_when(reaches(settings, 3), signal.SIGTERM)
    assert first.end() == second.end() == EXIT_CODE_INTERRUPTED
    assert "saved the run after step" in first.errors
    assert "saved the run" not in second.errors


SHARED: dict[str, Any] = {**RUN, "batch": {"micro_batch_size": 1}}


@pytest.fixture(scope="module")
def shared(_workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainSettings:
    """Return the settings of a finished, uninterrupted run of two processes."""
    return finished_run(_workshop, tmp_path_factory, SHARED, num_processes=2)


def workers_of(launched: psutil.Process) -> list[psutil.Process]:
    return [worker for launcher in launched.children() for worker in launcher.children()]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["step", "evaluation", "saving"])
@pytest.mark.parametrize("how", ["SIGTERM", "Ctrl-C", "killed parent", "killed worker"])
def test_a_launched_run_ends_with_all_its_processes_and_goes_on_where_it_was(
    workshop: Path, shared: TrainSettings, how: str, moment: str
) -> None:
    settings = tiny_run(workshop, **SHARED)
    config = workshop / "launched.yaml"
    config.write_text(dump_settings(settings))
    words = [sys.executable, "-m", "jakiro", "train", "--config", str(config), "--processes", "2"]
    output = workshop / "output.txt"
    with output.open("w") as file:
        started = psutil.Popen(words, stdout=file, stderr=file, start_new_session=True)
    is_time = {
        "step": reaches(settings, 2),
        "evaluation": lambda: "after step 4" in output.read_text(),
        "saving": writes(settings, "checkpoints/.partial", 2),
    }[moment]
    while not is_time():
        assert started.poll() is None, output.read_text()
        sleep(0.001)
    workers = workers_of(started)
    assert len(workers) == 2
    if how == "Ctrl-C":
        os.killpg(started.pid, signal.SIGINT)
    elif how == "killed worker":
        workers[1].kill()
    else:
        started.send_signal(signal.SIGTERM if how == "SIGTERM" else signal.SIGKILL)
    code = started.wait(100)
    assert psutil.wait_procs(workers, 2 if how == "killed parent" else 0)[1] == []
    if how in ("SIGTERM", "Ctrl-C"):
        assert code == EXIT_CODE_INTERRUPTED, output.read_text()
        assert "Traceback" not in output.read_text()
        assert "saved the run after step" in " ".join(output.read_text().split())
    else:
        assert code != 0
    subprocess.run(words, check=True, capture_output=True)
    assert_same(shared, settings)


@pytest.mark.slow
@pytest.mark.parametrize(("killed", "count"), [(0, 2), (2, 3)])
def test_the_end_of_another_process_is_reported_in_one_line(
    workshop: Path, killed: int, count: int
) -> None:
    batch = {"micro_batch_size": 1, "global_batch_size": 2 * count}
    settings = tiny_run(workshop, steps=1000, batch=batch)
    trainees = start_training(settings, workshop, num_processes=count)
    assert trainees[killed].kill_when(reaches(settings, 3))
    for left in (trainee for rank, trainee in enumerate(trainees) if rank != killed):
        assert left.end() == EXIT_CODE_BAD_INPUT
        *_, last = left.errors.strip().splitlines()
        found = re.match(r"error: another process of this run ended after step (\d+);", last)
        assert found, last
        assert int(found[1]) >= 2
        assert "Traceback" not in left.errors


def test_a_second_interruption_ends_the_run_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    interruption = Interruption(ALONE)
    with interruption.receive():
        assert not interruption.is_requested(waits=True)
        signal.raise_signal(signal.SIGINT)
        assert interruption.is_requested(waits=False)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.faults
def test_a_run_that_is_killed_anywhere_ends_like_an_uninterrupted_run(
    workshop: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Kill ten runs at random steps, and ten while a checkpoint or a drafter is written."""
    whole = finished_run(workshop, tmp_path_factory, LONG)
    generator = random.Random(0)
    points: list[tuple[int, str | None]] = [(generator.randint(1, 18), None) for _ in range(10)]
    points += [(generator.randint(1, 14), name) for name in WRITTEN * 2]
    num_killed = 0
    for number, (line, name) in enumerate(points):
        settings = tiny_run(workshop, **LONG, run_folder=str(workshop / f"run-{number}"))
        is_time = reaches(settings, line) if name is None else writes(settings, name, line)
        is_killed = kill(settings, workshop, is_time)
        assert is_killed or name is not None
        num_killed += is_killed
        train_in_processes(settings, workshop)
        assert_same(whole, settings)
    assert num_killed >= 14  # some paths exist too briefly to be noticed


@pytest.mark.parametrize(
    "engine",
    [{"zero_stage": 2}, pytest.param({"zero_stage": 3, "dtype": "bf16"}, marks=pytest.mark.slow)],
)
def test_a_run_goes_on_with_another_number_of_processes(
    workshop: Path, engine: dict[str, Any]
) -> None:
    changes: dict[str, Any] = {
        **{"steps": 5, "checkpoint": {"every": 2}, "evaluation": {"num_prompts": 0}},
        **{"batch": {"micro_batch_size": 1}, "engine": engine},
    }
    alone = tiny_run(workshop, **changes, run_folder=str(workshop / "alone"))
    train_in_processes(alone, workshop)
    settings = tiny_run(workshop, **changes)
    first, second = start_training(settings, workshop, num_processes=2)
    assert first.kill_when(reaches(settings, 4))
    second.kill_when(lambda: True)
    train_in_processes(settings, workshop)
    is_exact = engine.get("dtype") is None
    for one, other in zip(records(alone), records(settings), strict=True):
        if "loss" in one:
            assert one["loss"] == pytest.approx(other["loss"], abs=1e-4 if is_exact else 0.02)


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_leaves_the_last_checkpoint(
    workshop: Path, whole: TrainSettings
) -> None:
    settings = tiny_run(workshop, **RUN)
    assert kill(settings, workshop, reaches(settings, 5))
    before = sorted((settings.run_folder / "checkpoints").rglob("*"))
    weight = next(path for path in before if path.name == "weight.safetensors")
    limit = weight.stat().st_size // 2
    # Without checkpoints, the records or the drafter cannot be written.
    for every in (None, 3):
        changed = tiny_run(workshop, **RUN | {"checkpoint": {"every": every, "keep_best": False}})
        (limited,) = start_training(changed, workshop, file_limit=limit)
        assert limited.end() == 2, limited.errors
        *_, last = limited.errors.strip().splitlines()
        assert last.startswith("error: cannot read or write ")
        assert "free disk space, and run the command again; finished work is kept" in last
    assert sorted((settings.run_folder / "checkpoints").rglob("*")) == before
    train_in_processes(settings, workshop)
    assert_same(whole, settings)
