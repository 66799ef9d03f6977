"""Only the first process logs, to standard error; the progress bars of libraries can be hidden."""

import pytest
from huggingface_hub.utils.tqdm import (
    are_progress_bars_disabled,
)
from transformers.utils.logging import is_progress_bar_enabled

from jakiro.utils.logs import get_logger, quiet_libraries


def test_other_ranks_are_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    get_logger("training.loop.trainer").warning("few documents")
    assert not capsys.readouterr().err


def test_libraries_are_quiet_until_the_outermost_caller_is_done() -> None:
    assert is_progress_bar_enabled()
    with quiet_libraries():
        with quiet_libraries():
            pass
        assert not is_progress_bar_enabled()
        assert not are_progress_bars_disabled()  # downloads keep their bars
    assert is_progress_bar_enabled()


def test_a_record_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    get_logger("training").info("%s [bold]end", "word " * 60)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.partition("] ")[2] == f"INFO {'word ' * 60} [bold]end"
