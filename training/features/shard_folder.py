"""The folder that shards are written into, by one process or by several side by side."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from jakiro.errors import ConfigError
from jakiro.files import ensure_writable_folder
from training.features.identity import ways_to_repeat
from training.features.index import FeatureIndex, Shard, is_intact, is_whole, read_index


class ShardFolder:
    """Knows which shards are there, and who works on which.

    Args:
        path: the folder; created if it is missing.
        fresh: the index of what is to be written, without shards.

    Raises:
        ConfigError: the folder cannot be written to, or holds other features.
        CheckpointError: its index cannot be read.
    """

    def __init__(self, path: Path, fresh: FeatureIndex) -> None:
        self.path = ensure_writable_folder(path)
        with self._lock("index"):
            index = read_index(self.path)
            if index is None:
                fresh.write(self.path)
        self.index = fresh if index is None else index
        _require_same(self.path, self.index, fresh)

    def unfinished(self) -> list[int]:
        """Return the numbers of the shards that are not there in full by now."""
        index = self.index = read_index(self.path) or self.index
        whole = {shard.first_row for shard in index.shards if is_whole(self.path, shard)}
        return [n for n in range(index.num_shards) if index.rows_of(n).start not in whole]

    @contextmanager
    def claim(self, number: int) -> Iterator[bool]:
        """Yield whether a shard is this process's to write: missing, and nobody is at it."""
        with ExitStack() as held:
            try:
                held.enter_context(self._lock(self.index.file_of(number)).acquire(timeout=0))
                is_free = True
            except Timeout:
                is_free = False
            yield is_free and number in self.unfinished()

    def add(self, shard: Shard) -> None:
        """Take note of a finished shard."""
        self._update(lambda index: index.with_shard(shard))

    def drop_damaged(self) -> list[str]:
        """Forget the shards whose bytes are not those that were written; return their names."""
        damaged = [shard for shard in self.index.shards if not is_intact(self.path, shard)]
        self._update(lambda index: index.without(damaged))
        return [shard.file for shard in damaged]

    def tidy(self) -> None:
        """Remove what only writing needs."""
        for lock in self.path.glob(".*.lock"):
            lock.unlink(missing_ok=True)

    def _lock(self, name: str) -> FileLock:
        return FileLock(self.path / f".{name}.lock")

    def _update(self, change: Callable[[FeatureIndex], FeatureIndex]) -> None:
        with self._lock("index"):
            self.index = change(read_index(self.path) or self.index)
            self.index.write(self.path)


def _require_same(folder: Path, found: FeatureIndex, wanted: FeatureIndex) -> None:
    difference = found.identity.difference(wanted.identity)
    if difference is None and found.widths != wanted.widths:
        difference = ("parts", ", ".join(found.widths), ", ".join(wanted.widths))
    if difference is not None:
        name, got, expected = difference
        raise ConfigError(
            f"the folder {folder} holds other features ({name} differs)",
            expected=expected,
            got=got,
            remedy=f"{ways_to_repeat(name)}choose another folder",
        )
