"""Progress of long work: bars in a terminal, lines elsewhere."""

import io
import time
from threading import Event

import pytest
from rich.console import Console

from jakiro.utils import progress
from jakiro.utils.progress import (
    ProgressDisplay,
    in_background,
    line_of,
    writing_progress,
)


class _Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _console(terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100)


def _text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("is_shown", [False, True])
def test_without_a_terminal_lines_are_written_until_the_display_stops(
    is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0.02)
    console = _console()
    with ProgressDisplay(console=console, is_shown=is_shown) as display:
        display.add_task("Writing", total=1200)
        time.sleep(0.3)
    written = _text(console)
    assert ("Writing: 0 of 1,200, 0:00 elapsed\n" in written) is is_shown
    time.sleep(0.1)
    assert _text(console) == written


def test_a_terminal_gets_a_bar_whose_times_say_what_they_are() -> None:
    console = _console(terminal=True)
    with ProgressDisplay(console=console) as display:
        display.advance(display.add_task("Decoding", total=3))
        display.refresh()
    for text in ("1/3", "elapsed", "left"):
        assert text in _text(console)
    assert "1 of 3" not in _text(console)


def test_records_of_an_earlier_run_do_not_count_as_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, shown = _Clock(), list[ProgressDisplay]()

    def display(*columns: str) -> ProgressDisplay:
        shown.append(ProgressDisplay(*columns, console=_console()))
        shown[0].get_time = clock
        return shown[0]

    monkeypatch.setattr(progress, "ProgressDisplay", display)
    with writing_progress("Writing", 120) as advance:
        advance(20, 0)  # of an earlier run
        clock.now += 600
        advance(40, 21_000)
        clock.now += 600
        advance(60, 42_000)
        words = "Writing: 60 of 120, 35 tokens/s, 20:00 elapsed, about 30:00 left"
        assert line_of(shown[0].tasks[0]) == words


def test_the_result_of_a_call_in_the_background_arrives_when_the_call_has_ended() -> None:
    may_end = Event()
    call = in_background(lambda: may_end.wait(10))
    assert not call.done()
    may_end.set()
    assert call.result(10.0)
