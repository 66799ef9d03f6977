"""Versions of a drafter's weights in a folder: written as a whole, and checked before use."""

import shutil
import uuid
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Literal, NamedTuple

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from jakiro.errors import CheckpointError, ConfigError
from jakiro.utils.files import ensure_writable_folder, publish

_RECORD, _WEIGHTS = "version.json", "weights.safetensors"
_PARTIAL = ".partial-"
_LOCK = ".lock"


class VersionRecord(BaseModel):
    """The origin of a version, and the measurements that speak for it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    number: int = Field(ge=1)
    parent: int = Field(ge=0)  # 0 for the drafter itself
    identity: str  # fingerprint of the drafter's own weights and of its target
    tenants: tuple[str, ...]  # users from whose texts this version or one before it has learned
    sha256: str = ""  # hash of the file with the weights
    before: float  # tau of the parent on held-out texts
    after: float  # tau of this version on the same texts
    low: float  # lower bound of after / before


class Version(NamedTuple):
    """A version that was read and checked."""

    record: VersionRecord
    weights: dict[str, Tensor]


class VersionFolder:
    """The versions of one drafter.

    Args:
        path: folder, which is created if it is missing; only its owner can read it.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self.path = ensure_writable_folder(path)
        self.path.chmod(0o700)
        self.identity = identity

    @property
    def numbers(self) -> list[int]:
        """The numbers of all versions, in ascending order, whether they can be used or not."""
        if not self.path.is_dir():  # somebody has deleted it
            return []
        names = (path.name for path in self.path.iterdir() if path.is_dir())
        return sorted(int(name) for name in names if name.isascii() and name.isdigit())

    def write(self, record: VersionRecord, weights: Mapping[str, Tensor]) -> VersionRecord:
        """Write a version, and return its record; a reader finds all of it or nothing."""
        data = save({name: weight.cpu().contiguous() for name, weight in weights.items()})
        record = record.model_copy(update={"sha256": sha256(data).hexdigest()})
        partial = self.path / f"{_PARTIAL}{uuid.uuid4().hex}"
        partial.mkdir()
        try:
            (partial / _WEIGHTS).write_bytes(data)
            (partial / _RECORD).write_text(record.model_dump_json(indent=2), encoding="utf-8")
            publish(partial, self._path_of(record.number))
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return record

    def record(self, number: int) -> VersionRecord:
        path = self._path_of(number) / _RECORD
        try:
            record = VersionRecord.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise CheckpointError(f"{path} is no complete record") from error
        if (record.number, record.identity) != (number, self.identity):
            got = f"version {record.number} of drafter {record.identity}"
            raise CheckpointError(f"{path} belongs to another version or drafter", got=got)
        return record

    def read(self, number: int) -> Version:
        record = self.record(number)
        path = self._path_of(number) / _WEIGHTS
        try:
            data = path.read_bytes()
            if sha256(data).hexdigest() != record.sha256:
                raise CheckpointError(f"{path} was changed or cut off")
            return Version(record, load(data))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read") from error

    def remove(self, number: int) -> None:
        """Remove a version, if there is one; its number may then be used again."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self._path_of(number))

    def clean(self, keep: int) -> None:
        """Remove what interrupted processes have left, and all but the newest versions.

        No process may be writing a version.
        """
        for path in self.path.glob(f"{_PARTIAL}*"):
            shutil.rmtree(path, ignore_errors=True)
        for number in self.numbers[:-keep]:
            self.remove(number)

    def taught_by(self, tenant: str) -> list[int]:
        """Return the numbers of all versions that may have learned from a tenant."""
        return [number for number in self.numbers if self.may_know(number, tenant)]

    def may_know(self, number: int, tenant: str) -> bool:
        """Return whether a version may have learned from a tenant, as one without a record may.

        Args:
            number: number of the version; 0 for the drafter itself, which has not.
        """
        if number == 0:
            return False
        try:
            return tenant in self.record(number).tenants
        except CheckpointError:
            return True

    def _path_of(self, number: int) -> Path:
        return self.path / f"{number:06d}"


def lock_of(folder: Path) -> FileLock:
    """Return the lock of a folder of versions, which is held until it is released."""
    lock = FileLock(folder / _LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise ConfigError(
            f"another process uses the versions in {folder}",
            remedy="stop the other server, or choose another --adapt-folder",
        ) from error
    return lock
