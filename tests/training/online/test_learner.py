"""The process that learns: better versions only, from the right drafter, killed at any time."""

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.adaptation import save_pair, tiny_lesson
from helpers.models import tiny_settings

from inference.adaptation.lesson import Lesson, Passage, read_result
from inference.adaptation.versions import VersionFolder
from inference.adaptation.weights import ReplaceableWeights
from jakiro.drafter import JakiroDrafter
from jakiro.errors import CheckpointError
from training.online import learner
from training.online.learner import learn

COMMAND = [sys.executable, "-m", "training.online.learner"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def lesson(pair: Path) -> Lesson:
    return tiny_lesson(pair)


def _with(lesson: Lesson, folder: Path, **changes: Any) -> Lesson:
    return lesson.model_copy(update={"folder": folder, **changes})


@pytest.mark.slow
def test_a_drafter_learns_and_learns_on_from_its_version(lesson: Lesson, tmp_path: Path) -> None:
    found = learn(_with(lesson, tmp_path))
    assert (found.outcome, found.version) == ("better", 1)
    assert found.after is not None
    assert found.before is not None
    assert found.low is not None
    assert found.after > 1.1 * found.before
    assert 1 < found.low < found.after / found.before
    folder = VersionFolder(tmp_path, lesson.identity)
    version = folder.read(1)
    assert version.record.tenants == ("alice",)
    drafter = JakiroDrafter.from_pretrained(lesson.drafter)
    ReplaceableWeights(drafter).check(version.weights)
    shorter = lesson.recipe.model_copy(update={"passes": 1})
    second = {"number": 2, "parent": 1, "tenants": ("bob",), "seed": 1, "recipe": shorter}
    again = learn(_with(lesson, tmp_path, **second))
    assert again.before == found.after  # the second lesson starts where the first one has ended
    if again.version is not None:
        assert folder.read(2).record.tenants == ("alice", "bob")


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        tiny_settings(trunk={"kind": "hybrid"}),
        tiny_settings(trunk={"kind": "feedback"}, head="own"),
        tiny_settings(num_experts=1, parallel_levels=0),
    ],
    ids=["hybrid", "feedback", "one expert"],
)
def test_all_kinds_of_trained_drafters_learn(settings: Any, tmp_path: Path) -> None:
    found = learn(tiny_lesson(save_pair(tmp_path, settings)))
    assert found.outcome in {"better", "not_better"}
    assert found.after is not None
    assert found.before is not None
    assert found.after > found.before


@pytest.mark.slow
def test_random_tokens_teach_nothing_that_is_offered(lesson: Lesson, tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    noise = [
        Passage(
            token_ids=tuple(torch.randint(1, 60, (40,), generator=random).tolist()), prompt_length=4
        )
        for _ in range(32)
    ]
    recipe = lesson.recipe.model_copy(update={"learning_rate": 0.3, "passes": 2})
    found = learn(_with(lesson, tmp_path, learned=tuple(noise), recipe=recipe))
    assert found.outcome == "not_better"
    assert VersionFolder(tmp_path, lesson.identity).numbers == []


def test_a_drafter_that_was_replaced_meanwhile_is_refused(lesson: Lesson, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has changed since the server has loaded it"):
        learn(_with(lesson, tmp_path, identity="0" * 32))


@contextmanager
def _process(lesson: Lesson) -> "Iterator[subprocess.Popen[bytes]]":
    """A process that learns from a lesson."""
    with subprocess.Popen(
        COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdin is not None
        process.stdin.write(lesson.model_dump_json().encode())
        process.stdin.close()
        yield process


def _output(process: "subprocess.Popen[bytes]") -> bytes:
    assert process.stdout is not None
    return process.stdout.read()


def test_the_process_reports_a_lesson_that_it_cannot_use(
    monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    # In this process, whose priority and parent stay as they are: a start takes seconds.
    monkeypatch.setattr(os, "nice", lambda _: None)
    monkeypatch.setattr(learner, "end_with_parent", os.getppid)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"{}")))
    learner.main()
    found = read_result(capsysbinary.readouterr().out)
    assert found.outcome == "failed"
    assert "the lesson cannot be read" in found.error


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_a_whole_version_or_none(
    lesson: Lesson, tmp_path: Path
) -> None:
    started = time.monotonic()
    with _process(_with(lesson, tmp_path / "whole")) as process:
        output = _output(process)
    seconds = time.monotonic() - started
    assert read_result(output).outcome == "better"
    for number in range(3):
        folder = tmp_path / f"killed-{number}"
        with _process(_with(lesson, folder)) as process:
            time.sleep(seconds * (0.3 + 0.3 * number))
            os.kill(process.pid, signal.SIGKILL)
            output = _output(process)
        versions = VersionFolder(folder, lesson.identity)
        for found in versions.numbers:
            assert versions.read(found).record.number == 1
        if output:
            assert read_result(output).outcome == "better"
