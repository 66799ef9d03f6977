"""Versions are found whole, or refused."""

import shutil
from pathlib import Path

import pytest
import torch

from inference.adaptation.versions import VersionFolder, VersionRecord
from jakiro.errors import CheckpointError


def _record(number: int, *tenants: str, identity: str = "mine") -> VersionRecord:
    return VersionRecord(
        number=number,
        parent=number - 1,
        identity=identity,
        tenants=tenants,
        before=2.0,
        after=2.5,
        low=1.1,
    )


def _weights(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"experts.down": torch.full((2, 3), value)}


@pytest.fixture
def folder(tmp_path: Path) -> VersionFolder:
    return VersionFolder(tmp_path / "versions", "mine")


def test_a_version_is_read_as_it_was_written(folder: VersionFolder) -> None:
    record = _record(1, "a")
    folder.write(record, _weights(0.5))
    found = folder.read(1)
    assert found.record == record
    assert torch.equal(found.weights["experts.down"], _weights(0.5)["experts.down"])
    assert folder.numbers == [1]
    assert folder.path.stat().st_mode & 0o077 == 0


def test_a_version_cut_off_at_any_byte_is_refused(folder: VersionFolder) -> None:
    folder.write(_record(1, "a"), _weights())
    path = folder.path / "000001.safetensors"
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="cannot be read"):
            folder.read(1)
    path.write_bytes(whole)
    assert folder.read(1).record.number == 1
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        folder.read(1)


def test_versions_of_another_drafter_or_number_are_refused(folder: VersionFolder) -> None:
    folder.write(_record(1, "a", identity="other"), _weights())
    with pytest.raises(CheckpointError, match="of drafter other"):
        folder.read(1)
    folder.write(_record(2, "a"), _weights())
    shutil.copy(folder.path / "000002.safetensors", folder.path / "000003.safetensors")
    with pytest.raises(CheckpointError, match="got: version 2"):
        folder.read(3)


def test_cleaning_removes_what_a_killed_process_left_and_old_versions(
    folder: VersionFolder,
) -> None:
    for number in range(1, 8):
        folder.write(_record(number, "a"), _weights())
    (folder.path / ".000008.safetensors.left.tmp").touch()
    folder.clean(keep=5)
    assert folder.numbers == [3, 4, 5, 6, 7]
    assert len(list(folder.path.iterdir())) == 5


def test_a_tenant_may_have_taught_a_version_without_a_record(folder: VersionFolder) -> None:
    folder.write(_record(1, "a"), _weights())
    folder.write(_record(2, "a", "b"), _weights())
    (folder.path / "000003.safetensors").touch()
    assert [number for number in folder.numbers if folder.may_know(number, "b")] == [2, 3]
    assert not folder.may_know(0, "b")
