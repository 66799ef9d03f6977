"""Versions of a drafter are shown and purged without a server."""

from pathlib import Path

import pytest
import torch
from helpers.commands import exit_code

from inference.adaptation.versions import VersionFolder, VersionRecord, lock_of

IDENTITY = 2 * "0123456789abcdef"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    versions = VersionFolder(tmp_path / IDENTITY, IDENTITY)
    for number, tenants in ((1, ("alice",)), (2, ("alice", "bob"))):
        record = VersionRecord(
            number=number,
            parent=number - 1,
            identity=versions.identity,
            tenants=tenants,
            before=2.0,
            after=2.5,
            low=1.1,
        )
        versions.write(record, {"experts.down": torch.ones(2)})
    return tmp_path


def test_versions_are_shown_with_those_who_taught_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / IDENTITY / "000003").mkdir()
    assert exit_code("adapt", "show", str(folder)) == 0
    shown = capsys.readouterr()
    assert "version 2, after 1: tau 2.00 to 2.50; learned from alice, bob" in shown.out
    assert "000003" in shown.err


def test_a_folder_without_versions_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / IDENTITY).mkdir()
    assert exit_code("adapt", "show", str(tmp_path)) == 0
    assert "there are no versions in" in capsys.readouterr().err


def test_a_purge_removes_what_a_user_has_taught(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("adapt", "purge", str(folder), "--user", "bob") == 0
    assert "removed 1 versions" in capsys.readouterr().err
    assert VersionFolder(folder / IDENTITY, IDENTITY).numbers == [1]


def test_folders_of_others_are_left_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = folder / "photos" / "202301"
    other.mkdir(parents=True)
    mode = (folder / "photos").stat().st_mode
    assert exit_code("adapt", "show", str(folder)) == 0
    assert exit_code("adapt", "purge", str(folder), "--user", "bob") == 0
    assert "photos" not in capsys.readouterr().err
    assert other.is_dir()
    assert (folder / "photos").stat().st_mode == mode


def test_a_folder_in_use_or_without_versions_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with lock_of(folder):
        assert exit_code("adapt", "purge", str(folder), "--user", "bob") == 2
    assert "another process uses the versions" in capsys.readouterr().err
    assert exit_code("adapt", "show", str(folder / "missing")) == 2
    assert "there are no versions" in capsys.readouterr().err
