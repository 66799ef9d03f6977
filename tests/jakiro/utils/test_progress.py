"""Progress of long work: bars in a terminal, lines elsewhere."""

import io
import time
from functools import partial

import pytest
from rich.console import Console
from rich.progress import ProgressColumn

from jakiro.utils import progress
from jakiro.utils.progress import ProgressDisplay, writing_progress


class _Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(progress.time, "monotonic", clock)
    return clock


def _console(terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100)


def _display(clock: _Clock, *columns: ProgressColumn) -> ProgressDisplay:
    display = ProgressDisplay(*columns)
    display.get_time = clock
    return display


def _text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_a_terminal_a_line_is_written_every_half_minute(clock: _Clock) -> None:
    console = _console()
    with ProgressDisplay(console=console) as display:
        display.get_time = clock
        task = display.add_task("Training", total=1200, rate="")
        for step in range(1, 101):
            clock.now += 1
            display.update(task, completed=12 * step, rate=f"{12 * step} tokens/s")
    lines = _text(console).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("Training: 360 of 1,200, 360 tokens/s, 0:30 elapsed, about 1:")
    assert lines[-1].startswith("Training: 1,080 of 1,200, 1080 tokens/s, 1:30 elapsed, about 0:")


def test_work_of_unknown_length_is_counted(clock: _Clock) -> None:
    console = _console()
    with ProgressDisplay(console=console) as display:
        display.get_time = clock
        task = display.add_task("Counting", total=None)
        clock.now += 31
        display.advance(task, 5000)
    assert _text(console) == "Counting: 5,000, 0:31 elapsed\n"


def test_short_work_writes_nothing(clock: _Clock) -> None:
    console = _console()
    with ProgressDisplay(console=console) as display:
        task = display.add_task("Decoding", total=3)
        for _ in range(3):
            clock.now += 5
            display.advance(task)
    assert _text(console) == ""


def test_a_terminal_gets_a_bar_and_no_lines(clock: _Clock) -> None:
    console = _console(terminal=True)
    with ProgressDisplay(console=console) as display:
        task = display.add_task("Decoding", total=3)
        clock.now += 100
        display.advance(task)
        display.refresh()
    assert "1/3" in _text(console)
    assert "1 of 3" not in _text(console)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_hidden_display_writes_nothing(clock: _Clock, terminal: bool) -> None:
    console = _console(terminal)
    with ProgressDisplay(console=console, is_shown=False) as display:
        task = display.add_task("Decoding", total=3)
        clock.now += 100
        display.advance(task)
    assert _text(console) == ""


def test_the_times_of_a_bar_say_what_they_are() -> None:
    console = _console(terminal=True)
    with ProgressDisplay(console=console) as display:
        display.advance(display.add_task("Training", total=2))
    assert "elapsed" in _text(console)
    assert "left" in _text(console)


def test_generated_records_are_shown_with_tokens_per_second(
    clock: _Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with writing_progress("Writing", 10, 4) as advance:
        clock.now += 40
        advance(4, 8000)
    assert "Writing: 4 of 10, " in (printed := capsys.readouterr().err)
    assert "tokens/s" in printed


def test_records_that_are_complete_at_the_same_moment_do_not_make_the_estimate_short(
    clock: _Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "ProgressDisplay", partial(_display, clock))
    with writing_progress("Writing", 120, 40) as advance:
        advance(20, 0)  # of an earlier run
        clock.now += 600
        for records in range(21, 61):
            advance(records, 1000 * records)
        clock.now += 30
        advance(60, 60_000)
    assert "10:30 elapsed, about 15:45 left" in capsys.readouterr().err


def test_the_first_record_of_a_batch_says_nothing_about_the_time_left(
    clock: _Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "ProgressDisplay", partial(_display, clock))
    with writing_progress("Writing", 3032, 32) as advance:
        advance(32, 0)  # of an earlier run
        for records, seconds in ((33, 60), (63, 60), (64, 60)):
            clock.now += seconds
            advance(records, 1000 * records)
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.endswith("1:00 elapsed")
    assert second.endswith("2:00 elapsed")
    assert third.endswith("3:00 elapsed, about 278:15 left")


def test_lines_are_written_while_nothing_makes_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0.02)
    stream = io.StringIO()
    with ProgressDisplay(console=Console(file=stream)) as display:
        display.add_task("Writing", total=12)
        time.sleep(0.3)
    written = stream.getvalue()
    assert written.count("Writing: 0 of 12, 0:00 elapsed") >= 2
    time.sleep(0.1)
    assert stream.getvalue() == written


class _SlowStream(io.StringIO):
    """A stream that takes time for everything that is written."""

    def write(self, text: str) -> int:
        time.sleep(0.05)
        return super().write(text)


def test_a_line_that_is_being_written_is_complete_when_the_display_has_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0.004)
    stream = _SlowStream()
    with ProgressDisplay(console=Console(file=stream)) as display:
        display.add_task("Writing", total=12)
        time.sleep(0.12)
    written = stream.getvalue()
    assert written.endswith("\n")
    time.sleep(0.2)
    assert stream.getvalue() == written
