"""Storage for sequences that are decoded together and that may join and leave at any time."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

BUCKET = 64  # attention reads slots in whole buckets, so that tensor shapes change rarely


def bucketed(count: int) -> int:
    """Return a number of slots, rounded up to a multiple of `BUCKET`."""
    return -(-count // BUCKET) * BUCKET


class SequenceStorage:
    """A tensor with one row for each sequence, in storage that may have room for more rows.

    Sequences that leave free their rows, and sequences that join take free rows, so that the rows
    of the other sequences need not be copied. The last slot of a row may contain padding.

    Args:
        storage: tensor whose last two dimensions are the slots of a sequence and their entries.
    """

    def __init__(self, storage: Float[Tensor, "..."], dim: int) -> None:
        self._storage = storage
        self._dim = dim
        self.live = storage  # view of the rows of the present sequences
        # For each row that no sequence uses, the number of slots that the last one may have left.
        self._num_left = [0] * storage.shape[dim]

    def select(self, indices: Sequence[int], num_used: Sequence[int] | None = None) -> None:
        """Keep only the given rows, in this order.

        Args:
            indices: index of each row to keep. A row may stay in place or move to a smaller index,
                but never to a larger one.
            num_used: number of slots that each present sequence may have written to; None if
                these numbers are unknown. Other slots are not copied.
        """
        count, slots = self._count, self._storage.shape[-2]
        ends = [min(used, slots) for used in num_used or ()]
        ends += [slots] * (count - len(ends))
        for destination, index in enumerate(indices):
            if destination != index:
                # Whatever is left of the former sequence is overwritten: masks do not hide NaN.
                end = max(ends[destination], ends[index])
                for used in (slice(end), slice(-1, None)):
                    self._row(destination)[..., used, :] = self._row(index)[..., used, :]
        self._num_left[len(indices) : count] = ends[len(indices) : count]
        self._show(len(indices))

    def show(self, count: int, num_used: int = 0) -> None:
        """Let `live` have a number of rows, the last of which may belong to no sequence.

        Args:
            num_used: number of slots that may be written to in rows that belong to no sequence.
        """
        added = slice(self._count, count)
        self._num_left[added] = [max(left, num_used) for left in self._num_left[added]]
        self._show(count)

    def append(self, other: "SequenceStorage") -> None:
        """Add a copy of the rows of another tensor, which has at most as many slots."""
        count, added = self._count, other._count
        if count + added > self._storage.shape[self._dim]:
            self._replace(max(count + added, 2 * count), self._storage.shape[-2])
        self._show(count + added)
        new = self.live.narrow(self._dim, count, added)
        end = other.live.shape[-2]
        new[..., :end, :] = other.live
        new[..., end : max(self._num_left[count : count + added], default=0), :] = 0
        new[..., max(end, new.shape[-2] - 1) :, :] = 0
        self._num_left[count : count + added] = [0] * added

    def reserve(self, num_slots: int) -> None:
        """Make room for a number of slots in each row; existing slots keep their contents."""
        if num_slots > self._storage.shape[-2]:
            self._replace(self._storage.shape[self._dim], num_slots)

    @property
    def num_rows(self) -> int:
        """The number of sequences for which there is room."""
        return self._storage.shape[self._dim]

    @property
    def _count(self) -> int:
        return self.live.shape[self._dim]

    def _row(self, index: int) -> Tensor:
        return self._storage.select(self._dim, index)

    def _show(self, count: int) -> None:
        self.live = self._storage.narrow(self._dim, 0, count)

    def _replace(self, num_rows: int, num_slots: int) -> None:
        shape = list(self._storage.shape)
        shape[self._dim], shape[-2] = num_rows, num_slots
        # Uninitialized memory may contain NaN, which would spread to every query despite the mask.
        old, self._storage = self.live, self._storage.new_zeros(shape)
        self._show(old.shape[self._dim])
        self._num_left = [0] * num_rows
        self.live[..., : old.shape[-2], :] = old


class SequenceStorages(ABC):
    """Several tensors with one row for each sequence, whose rows change together."""

    _storages: Sequence[SequenceStorage]

    def select_sequences(
        self, indices: Sequence[int], num_used: Sequence[int] | None = None
    ) -> None:
        for storage in self._storages:
            storage.select(indices, num_used)
        self._update()

    def show_rows(self, count: int, num_used: int = 0) -> None:
        for storage in self._storages:
            storage.show(count, num_used)
        self._update()

    def append_sequences(self, other: "SequenceStorages") -> None:
        self.reserve(other.capacity)
        for storage, added in zip(self._storages, other._storages, strict=True):
            storage.append(added)
        self._update()

    def reserve(self, capacity: int) -> None:
        """Make room for at least `capacity` slots; existing slots keep their contents."""
        if capacity > self.capacity:
            for storage in self._storages:
                storage.reserve(bucketed(capacity))
            self._update()

    @property
    def capacity(self) -> int:
        return self._storages[0].live.shape[-2]

    @abstractmethod
    def _update(self) -> None:
        """Replace all references to `SequenceStorage.live`, which has changed."""
