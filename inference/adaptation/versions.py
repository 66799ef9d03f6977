"""Versions of a drafter's weights: files with a record, each of which is written as a whole."""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from jakiro.errors import CheckpointError, ConfigError
from jakiro.utils.files import ensure_writable_folder, write_atomically

_RECORD = "record"  # key of the record in the metadata of a file
_ENDING = ".safetensors"
_LOCK = ".lock"


class VersionRecord(BaseModel):
    """The origin of a version, and the measurements that speak for it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    number: int = Field(ge=1)
    parent: int = Field(ge=0)  # 0 for the drafter itself
    identity: str  # fingerprint of the drafter's own weights and of its target
    tenants: tuple[str, ...]  # users from whose texts this version or one before it has learned
    before: float  # tau of the parent on held-out texts
    after: float  # tau of this version on the same texts
    low: float  # lower bound of after / before


class Version(NamedTuple):
    record: VersionRecord
    weights: dict[str, Tensor]
    digest: str  # of the file


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
        stems = [path.stem for path in self.path.glob(f"[0-9]*{_ENDING}")]
        return sorted(int(stem) for stem in stems if stem.isdigit())

    def write(self, record: VersionRecord, weights: Mapping[str, Tensor]) -> None:
        """Write a version; a reader finds all of it or nothing."""
        content = {name: weight.cpu().contiguous() for name, weight in weights.items()}
        data = save(content, {_RECORD: record.model_dump_json()})
        write_atomically(self._path_of(record.number), data)

    def record(self, number: int) -> VersionRecord:
        path = self._path_of(number)
        try:
            with safe_open(path, "pt") as file:
                record = VersionRecord.model_validate_json((file.metadata() or {})[_RECORD])
        except (OSError, SafetensorError, KeyError, ValidationError) as error:
            raise CheckpointError(f"{path} cannot be read") from error
        if (record.number, record.identity) != (number, self.identity):
            got = f"version {record.number} of drafter {record.identity}"
            raise CheckpointError(f"{path} belongs to another version or drafter", got=got)
        return record

    def read(self, number: int) -> Version:
        record, data = self.record(number), self._path_of(number).read_bytes()
        return Version(record, load(data), sha256(data).hexdigest())

    def remove(self, number: int) -> None:
        """Remove a version, if there is one; its number may then be used again."""
        self._path_of(number).unlink(missing_ok=True)

    def clean(self, keep: int) -> None:
        """Remove what interrupted processes have left, and all but the newest versions.

        No process may be writing a version.
        """
        for path in self.path.glob(".*.tmp"):
            path.unlink()
        for number in self.numbers[:-keep]:
            self.remove(number)

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
        return self.path / f"{number:06d}{_ENDING}"


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
