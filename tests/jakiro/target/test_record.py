"""The record of a target names it in a way that is valid in every working directory."""

from pathlib import Path

import pytest
from helpers.models import tiny_llama

from jakiro.target.adapter import TargetAdapter
from jakiro.target.record import record_target


def test_relative_paths_become_absolute_and_other_names_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "folder")
    spec = TargetAdapter(tiny_llama()).spec
    names = ("folder", "./folder", "latest", str(tmp_path / "folder"), "owner/model", "gone", "")
    recorded = [record_target(spec, name).name_or_path for name in names]
    folder, link = str(tmp_path / "folder"), str(tmp_path / "latest")
    assert recorded == [folder, folder, link, folder, "owner/model", "gone", ""]
