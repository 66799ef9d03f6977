"""Only the first process speaks, on standard error."""

import pytest

from jakiro.logs import get_logger


def test_records_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    get_logger("training.trainer").warning("few documents")
    captured = capsys.readouterr()
    assert "few documents" in captured.err
    assert not captured.out


def test_other_ranks_are_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    get_logger("training.trainer").warning("few documents")
    assert not capsys.readouterr().err


def test_loggers_lie_below_one_root() -> None:
    assert get_logger("jakiro.target").name == "jakiro.target"
    assert get_logger("inference.engine").name == "jakiro.inference.engine"
