"""`jakiro plot`: folders without a run are refused."""

from pathlib import Path

import pytest
from helpers.commands import exit_code


def test_a_folder_without_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "curves.png"
    assert exit_code("plot", str(tmp_path / "none"), "--out", str(picture)) == 2
    assert "error: " in capsys.readouterr().err
    assert not picture.exists()
