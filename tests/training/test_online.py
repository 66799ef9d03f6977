"""The process that learns: better versions only, beyond noise, killed at any time."""

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

import numpy as np
import pytest
from helpers.adaptation import RECIPE, save_pair, tiny_lesson
from helpers.models import tiny_drafter, tiny_llama

from inference.adaptation.lesson import Lesson, Passage, read_result
from inference.adaptation.versions import VersionFolder
from inference.adaptation.weights import ReplaceableWeights
from inference.benchmark.stats import Floats
from jakiro.drafter import JakiroDrafter
from jakiro.errors import CheckpointError
from jakiro.target.adapter import TargetAdapter
from training import online
from training.loss.anchors import AnchorRule
from training.online import (
    FEWEST,
    Drafters,
    GateResult,
    batches,
    compare_counts,
    compare_drafters,
    cut,
    learn,
)

COMMAND = [sys.executable, "-m", "training.online"]


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
    monkeypatch.setattr(online, "end_with_parent", os.getppid)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"{}")))
    online.main()
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


def _counts(rate: float | Floats, count: int, seed: int) -> Floats:
    random = np.random.default_rng(seed)
    steps = random.binomial(64, 1 / (rate * np.ones(count)))
    return np.array([np.full(count, 64.0), steps.astype(float)])


def _compared(before: Floats, after: Floats) -> GateResult:
    """The result of a first lesson: the drafter in use is the drafter itself."""
    return compare_counts(before, before, after)


@pytest.mark.slow
def test_equal_drafters_pass_in_at_most_three_percent_of_the_comparisons() -> None:
    found = [
        _compared(_counts(2.5, 16, seed), _counts(2.5, 16, seed + 10_000)) for seed in range(1000)
    ]
    passed = sum(result.low > 1 for result in found)
    assert passed <= 1000 * 0.035


@pytest.mark.parametrize("count", range(1, FEWEST))
def test_few_prompts_decide_nothing(count: int) -> None:
    assert not _compared(_counts(1.5, count, 0), _counts(4.0, count, 1)).is_better(0.02)


def test_small_losses_on_older_traffic_do_not_add_up() -> None:
    older = np.r_[np.full(16, 2.2), np.full(16, 1.5)]
    better = compare_counts(_counts(2.0, 32, 0), _counts(older * 0.9, 32, 1), _counts(2.6, 32, 2))
    assert better.is_better(0.02)
    rates = np.r_[np.full(16, 1.9), np.full(16, 2.6)]  # better than the one in use, everywhere
    own = _counts(np.r_[np.full(16, 2.3), np.full(16, 1.6)], 32, 3)
    found = compare_counts(own, _counts(rates * 0.9, 32, 1), _counts(rates, 32, 2))
    assert found.low > 1
    assert found.after > found.own
    assert found.older < 0.9
    assert not found.is_better(0.02)
    # A version must not be worse than the drafter itself either.
    found = GateResult(own=2.5, before=2.0, after=2.4, low=1.1, older=1.0, harm=1.1)
    assert not found.is_better(0.02)
    assert found._replace(after=2.5).is_better(0.02)


@pytest.mark.slow
def test_a_version_that_does_harm_is_found() -> None:
    own, worse, slightly = _counts(2.6, 32, 0), _counts(1.9, 32, 1), _counts(2.1, 32, 2)
    found = compare_counts(own, worse, slightly)
    assert found.is_harmful
    assert not found.is_better(0.02)


def test_a_drafter_is_not_better_than_itself() -> None:
    target = TargetAdapter(tiny_llama())
    drafter = tiny_drafter(target)
    before = {name: weight.clone() for name, weight in drafter.state_dict().items()}
    held_out = [Passage(token_ids=(1, 2, 3, number), prompt_length=3) for number in range(4)]
    found = compare_drafters(target, Drafters(drafter, drafter, drafter), held_out, RECIPE)
    assert found.own == found.before == found.after > 1
    assert found.low == found.older == found.harm == 1
    assert not found.is_better(0.02)
    assert not found.is_harmful
    assert all((weight == before[name]).all() for name, weight in drafter.state_dict().items())


def _passage(length: int, prompt: int, first: int = 1) -> Passage:
    return Passage(token_ids=tuple(range(first, first + length)), prompt_length=prompt)


@pytest.mark.parametrize(
    ("length", "prompt", "expected"),
    [
        (10, 4, (1, 10, 4)),  # it fits
        (10, 6, (3, 8, 4)),  # a long prompt loses its beginning
        (20, 3, (1, 8, 3)),  # a long continuation loses its end
        (20, 6, (3, 8, 4)),  # of two long parts, each keeps a half
        (20, 19, (13, 8, 7)),  # a short continuation stays
    ],
)
def test_texts_are_cut_to_eight_tokens(
    length: int, prompt: int, expected: tuple[int, int, int]
) -> None:
    first, count, prompt_length = expected
    found = cut(_passage(length, prompt), 8 if length > 10 or prompt > 4 else 10)
    assert found == _passage(count, prompt_length, first=first)


def test_each_pass_has_all_texts_once_and_learns_only_continuations() -> None:
    passages = [_passage(4 + number, 2, first=10 * number + 1) for number in range(5)]
    found = list(batches(passages, 2, 3, AnchorRule("ttt", 2, 2), seed=0))
    assert [len(batch.token_ids) for batch in found] == [2, 2, 1] * 3
    rows = [row.tolist() for batch in found for row in batch.token_ids]
    for begin in (0, 5, 10):
        assert sorted(row[0] for row in rows[begin : begin + 5]) == [1, 11, 21, 31, 41]
    for batch in found:
        real = batch.documents >= 0
        assert (batch.is_response == (real & (batch.positions >= 2))).all()
        assert batch.anchors.shape[1] == 2
        assert (batch.documents >= 0).any(dim=0).all()  # no column is padding in all rows
    orders = [[row[0] for row in rows[begin : begin + 5]] for begin in (0, 5, 10)]
    assert len(set(map(tuple, orders))) > 1
    again = batches(passages, 2, 3, AnchorRule("ttt", 2, 2), seed=0)
    assert rows == [row.tolist() for batch in again for row in batch.token_ids]
