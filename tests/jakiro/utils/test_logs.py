"""Only the first process logs, to standard error; the progress bars of libraries can be hidden."""

import pytest
from huggingface_hub.utils.tqdm import (
    are_progress_bars_disabled,
)
from transformers.utils.logging import is_progress_bar_enabled

from jakiro.utils.logs import bars_in_terminals, get_logger, quiet_libraries


def test_other_ranks_are_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    get_logger("training.loop.trainer").warning("few documents")
    assert not capsys.readouterr().err


def test_loggers_lie_below_one_root() -> None:
    assert get_logger("jakiro.target.adapter").name == "jakiro.target.adapter"
    assert get_logger("inference.engine.loop").name == "jakiro.inference.engine.loop"


def test_libraries_are_quiet_until_the_outermost_caller_is_done() -> None:
    assert is_progress_bar_enabled()
    with quiet_libraries():
        with quiet_libraries():
            pass
        assert not is_progress_bar_enabled()
        assert not are_progress_bars_disabled()  # downloads keep their bars
    assert is_progress_bar_enabled()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_bars_of_transformers_are_shown_in_a_terminal_only(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal, raising=False)
    before = is_progress_bar_enabled()
    with bars_in_terminals():
        assert is_progress_bar_enabled() == (is_terminal and before)
        assert not are_progress_bars_disabled()
    assert is_progress_bar_enabled() == before


def test_a_record_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    get_logger("training").info("%s [bold]end", "word " * 60)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.partition("] ")[2] == f"INFO {'word ' * 60} [bold]end"
