"""A run logs and evaluates its progress, ends in time, and continues after an interruption."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.interruptions import PowerCutError, interrupt_after
from helpers.training import curve, tiny_run

from jakiro.drafter import JakiroDrafter
from training.loop.metrics import read_metrics
from training.train import train


def test_the_log_has_the_length_of_a_run_and_its_evaluations(
    workshop: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    batch = {"global_batch_size": 64, "micro_batch_size": 32}
    train(tiny_run(workshop, steps=2, batch=batch, evaluation={"every": 1}))
    (length,) = [record for record in caplog.records if " tokens = " in record.message]
    assert length.levelname == "WARNING"
    assert length.message.startswith("2 steps, 6,144 tokens = 14.2 epochs: add data")
    found = r"tau_probabilistic \S+, held-out agreement \S+%, tau \d\S+"
    for step in (0, 1, 2):
        assert re.search(rf"step {step}: {found}", caplog.text)
    assert re.search(rf"drafter: the (last|best) drafter.*{found}", caplog.text)


def test_a_run_of_epochs_resumes_and_ends_like_a_run_of_as_many_steps(
    workshop: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    by_steps = tiny_run(workshop, steps=5, run_folder=str(workshop / "by-steps"))
    by_epochs = tiny_run(workshop, steps=None, epochs=2, checkpoint={"every": 3})
    train(by_steps)
    with monkeypatch.context() as patched:
        interrupt_after(patched, 3)
        with pytest.raises(PowerCutError):
            train(by_epochs)
    assert "the run resumes" not in caplog.text
    train(by_epochs)
    assert "the run resumes after step 3" in caplog.text
    assert curve(by_epochs) == curve(by_steps)


@pytest.fixture
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advance the clock by a second per reading, so that each optimizer step takes two seconds."""
    readings = itertools.count()
    monkeypatch.setattr("training.loop.run.perf_counter", lambda: float(next(readings)))


@pytest.mark.usefixtures("_clock")
def test_a_run_with_a_limit_of_minutes_ends_early_with_the_lowest_rate(workshop: Path) -> None:
    rates = {"learning_rate": 1.0, "warmup_steps": 0, "schedule": "linear", "min_lr_ratio": 0.0}
    settings = tiny_run(workshop, steps=20, minutes=6.9 / 60, optimizer=rates)
    folder = train(settings)
    lines = [line for line in read_metrics(settings.run_folder) if "learning_rate" in line]
    expected = [1 - seconds / 6.9 for seconds in (0, 1, 3, 5)]
    assert [line["learning_rate"] for line in lines] == pytest.approx(expected)
    assert JakiroDrafter.from_pretrained(folder).config.record["training"]["step"] == 4


@pytest.mark.usefixtures("_clock")
def test_the_minutes_of_a_run_include_those_before_an_interruption(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited: dict[str, Any] = {"steps": 20, "minutes": 0.2, "checkpoint": {"every": 1}}
    whole = tiny_run(workshop, **limited, run_folder=str(workshop / "whole"))
    train(whole)
    settings = tiny_run(workshop, **limited)
    with monkeypatch.context() as patched:
        interrupt_after(patched, 3)
        with pytest.raises(PowerCutError):
            train(settings)
    train(settings)
    assert len(curve(whole)) == 7
    assert len(curve(settings)) == 7
