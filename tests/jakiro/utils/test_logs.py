"""Only the first process logs, to standard error; the progress bars of libraries can be hidden."""

import logging

import pytest
from huggingface_hub.utils.tqdm import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)
from transformers.utils.logging import is_progress_bar_enabled

from jakiro.utils.logs import bars_in_terminals, get_logger, quiet_libraries


def test_records_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    get_logger("training.loop.trainer").warning("few documents")
    captured = capsys.readouterr()
    assert "few documents" in captured.err
    assert not captured.out


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


def test_hidden_bars_of_downloads_stay_hidden() -> None:
    disable_progress_bars()
    try:
        with quiet_libraries():
            assert are_progress_bars_disabled()
        assert are_progress_bars_disabled()
    finally:
        enable_progress_bars()


def test_deepspeed_does_not_say_that_there_is_no_gpu() -> None:
    logger = logging.getLogger("DeepSpeed")
    heard: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = heard.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    hint = "Setting accelerator to CPU. If you have GPU or other accelerator, we were unable to"
    with quiet_libraries():
        with quiet_libraries():
            pass
        logger.error(hint)
        logger.error("The loss is not finite.")
    logger.error(hint)
    logger.removeHandler(handler)
    assert [record.getMessage() for record in heard] == ["The loss is not finite.", hint]


def test_a_line_is_not_broken_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    get_logger("training").info("%s [bold]end", "word " * 60)
    (line,) = capsys.readouterr().err.splitlines()
    assert " INFO word word" in line
    assert line.endswith("word [bold]end") or line.endswith("word  [bold]end")
