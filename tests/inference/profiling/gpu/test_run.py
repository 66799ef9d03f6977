"""`jakiro profile gpu` runs every section, stores every row, and goes on after errors."""

import json
import math
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Thread
from typing import Any, get_args

import pytest
import torch
from helpers.commands import exit_code

from inference.profiling.gpu import run
from inference.profiling.gpu.document import GPUDocument, Row, SectionResult, schema
from inference.profiling.gpu.run import (
    GPUProfileSettings,
    OutOfTime,
    Section,
    SectionName,
    gpu_state,
    measure_gpu,
    state_of,
    time_limit,
)
from inference.profiling.gpu.sections import batch, headline, recordings, verify
from inference.profiling.gpu.sections.autoregressive import ARMS
from inference.profiling.gpu.workbench import Workbench

QUICK = GPUProfileSettings(device="cpu", quick=True)


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _numbers(each)
    elif isinstance(value, float):
        yield value


def test_a_quick_run_measures_every_section(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    words = ("profile", "gpu", "--quick", "--device", "cpu", "--json", str(path))
    assert exit_code(*words) == 0
    document = GPUDocument.model_validate_json(path.read_bytes())
    assert document.is_complete
    assert document.is_valid
    assert tuple(document.sections) == get_args(SectionName)
    for section in document.sections.values():
        assert section.error is None
        # All tokens are equal, and nothing has failed.
        assert {row.state for row in section.rows} <= {"measured", "not there yet"}
        assert all(row.reason for row in section.rows if row.state == "not there yet")
        assert all(math.isfinite(number) for row in section.rows for number in _numbers(row.values))
    assert {row.arm for row in document.sections["autoregressive"].rows} == ARMS.keys()
    assert document.headline.ratio_greedy is not None
    assert document.headline.ratio_sampled is not None
    assert {each.state for each in document.criteria} == {"not measured"}
    captured = {
        "autoregressive": "ours captured",
        "verify": verify.CAPTURED,
        "recordings": recordings.CAPTURED,
        "headline": headline.CAPTURED_DRAFTING,
        "batch": batch.LANES,
    }
    for section, arm in captured.items():
        rows = [row for row in document.sections[section].rows if row.arm == arm]
        assert rows
        assert {row.state for row in rows} == {"measured"}
    assert document.environment["settings"]["quick"] is True
    assert json.loads(schema())["title"] == "GPUDocument"


def _good(bench: Workbench, found: Mapping[str, SectionResult]) -> Iterator[Row]:
    yield Row(arm="good", values={"ms": 1.0})


def _crashing(bench: Workbench, found: Mapping[str, SectionResult]) -> Iterator[Row]:
    yield Row(arm="first", values={"ms": 1.0})
    raise RuntimeError("out of memory\nand a long explanation")


def _slow(bench: Workbench, found: Mapping[str, SectionResult]) -> Iterator[Row]:
    yield Row(arm="fast", values={"ms": 1.0})
    time.sleep(30)
    yield Row(arm="slow", values={"ms": 1.0})


def _wrong(bench: Workbench, found: Mapping[str, SectionResult]) -> Iterator[Row]:
    yield Row(arm="wrong", state="invalid", reason="new token 0 is 3 instead of 4")


@pytest.fixture
def sections(monkeypatch: pytest.MonkeyPatch) -> dict[str, Section]:
    """The sections of the run, which the test may replace; at first, all are good."""
    every = {name: Section(1.0, _good) for name in get_args(SectionName)}
    monkeypatch.setattr(run, "SECTIONS", every)
    return every


@pytest.mark.slow
def test_a_section_that_raises_or_takes_too_long_leaves_the_others(
    sections: dict[str, Section],
) -> None:
    sections["verify"] = Section(1.0, _crashing)
    sections["draft"] = Section(0.002, _slow)
    stored: list[str] = []
    document = measure_gpu(QUICK, stored.append)
    assert document.is_complete
    assert document.is_valid
    assert tuple(document.sections) == get_args(SectionName)
    failed, stopped = document.sections["verify"], document.sections["draft"]
    assert failed.error == "RuntimeError: out of memory"
    assert [row.arm for row in failed.rows] == ["first"]
    assert stopped.error == "the section was stopped at its time limit of 0.002 minutes"
    assert [row.arm for row in stopped.rows] == ["fast"]
    assert [name for name, each in document.sections.items() if each.error is None] == [
        name for name in get_args(SectionName) if name not in ("verify", "draft")
    ]
    # Every row was stored when it was measured.
    sizes = [
        sum(len(section["rows"]) for section in json.loads(text)["sections"].values())
        for text in stored
    ]
    assert set(sizes) == set(range(1, 9))
    assert not json.loads(stored[0])["is_complete"]


def test_wrong_tokens_give_exit_code_1(sections: dict[str, Section], tmp_path: Path) -> None:
    sections["step"] = Section(1.0, _wrong)
    path = tmp_path / "gpu.json"
    words = ("--quick", "--device", "cpu", "--only", "step", "--only", "machine")
    assert exit_code("profile", "gpu", *words, "--json", str(path)) == 1
    document = GPUDocument.model_validate_json(path.read_bytes())
    assert not document.is_valid
    assert tuple(document.sections) == ("machine", "step")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--device", "cpu"), "--quick --device cpu"),
        (("--device", "tpu", "--quick"), "no such device"),
        (("--only", "nonsense"), "unusable value for '--only"),
        (("--quick", "--device", "cpu", "--json", "no/such/folder.json"), "no such folder"),
    ],
)
def test_unusable_options_are_refused(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("profile", "gpu", *words) == 2
    assert message in capsys.readouterr().err


def test_numbers_are_read_and_other_values_are_kept_as_texts() -> None:
    state = state_of("1980, 2619, 691.18, 64, [N/A], 40211\n")
    assert state == {
        "sm_mhz": 1980,
        "memory_mhz": 2619,
        "watts": 691.18,
        "celsius": 64,
        "busy_percent": "[N/A]",
        "used_mib": 40211,
    }


def test_a_cpu_and_an_empty_output_have_no_state() -> None:
    assert gpu_state(torch.device("cpu")) is None
    assert state_of("\n") is None


def test_work_is_stopped_at_its_limit_even_if_it_handles_exceptions() -> None:
    handled: list[Exception] = []

    def work() -> None:
        try:
            time.sleep(5)
        except Exception as error:  # noqa: BLE001 - this is what must not happen
            handled.append(error)

    started = time.monotonic()
    with pytest.raises(OutOfTime), time_limit(0.05):
        work()
    assert time.monotonic() - started < 4
    assert not handled


def test_work_within_its_limit_ends_normally_and_the_timer_of_the_caller_goes_on() -> None:
    before = signal.getitimer(signal.ITIMER_REAL)[0]
    with time_limit(30.0):
        result = 1 + 1
    after = signal.getitimer(signal.ITIMER_REAL)[0]
    assert result == 2
    assert (after > 0) == (before > 0)
    assert after <= before


def test_in_another_thread_there_is_no_limit() -> None:
    done: list[bool] = []

    def work() -> None:
        with time_limit(0.001):
            time.sleep(0.05)
        done.append(True)

    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
