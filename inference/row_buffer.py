"""Preallocated rows of one attention module, written by position and read as a prefix."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from jakiro.slots import bucketed, grown, in_place, kept, write_rows
from moa.rows import Rows


class RowBuffer:
    """Keys and values of one session; a row's slot is its token's position.

    Args:
        batch: number of sequences.
        num_kv_heads: key/value heads.
        capacity: positions; rounded up to whole buckets.
        head_dim: size of one head.
        like: a tensor with the dtype and device to use.
    """

    def __init__(
        self, batch: int, num_kv_heads: int, capacity: int, head_dim: int, like: Tensor
    ) -> None:
        # Zeros, not garbage: a NaN in a masked value row would poison every query.
        shape = (batch, num_kv_heads, bucketed(capacity), head_dim)
        self._rows = Rows(in_place(like.new_zeros(shape)), in_place(like.new_zeros(shape)))

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return self._rows.keys.shape[2]

    def write(self, rows: Rows, slots: Int[Tensor, "batch rows"]) -> None:
        """Store rows at `slots`."""
        for buffer, new in zip(self._rows, rows, strict=True):
            write_rows(buffer, new, slots)

    def prefix(self, count: int) -> Rows:
        """Return the first `count` rows, rounded up to whole buckets, without copying."""
        count = min(bucketed(count), self.capacity)
        return Rows(*(buffer[:, :, :count] for buffer in self._rows))

    def write_through(self, slots: Int[Tensor, "batch rows"], count: int) -> "WriteThrough":
        """Return a store that keeps new rows at `slots` and shows the first `count`."""
        return WriteThrough(self, slots, count)

    def keep(self, places: Sequence[int]) -> None:
        """Drop all sequences but those at these places, which are ascending."""
        self._rows = Rows(*(kept(buffer, places, dim=0) for buffer in self._rows))

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` rows, keeping those that are there."""
        if capacity > self.capacity:
            self._rows = Rows(*(grown(buffer, bucketed(capacity)) for buffer in self._rows))


class WriteThrough:
    """A `moa.rows.RowStore` over a buffer.

    Args:
        buffer: where rows go.
        slots: of the new rows.
        count: rows to show; `self.count` is that rounded up to whole buckets.
    """

    def __init__(self, buffer: RowBuffer, slots: Tensor, count: int) -> None:
        self.buffer, self.slots = buffer, slots
        self.count = min(bucketed(count), buffer.capacity)

    def __call__(self, rows: Rows) -> Rows:
        """Store the rows and return everything that may be attended to."""
        self.buffer.write(rows, self.slots)
        return self.buffer.prefix(self.count)


def token_slots(start: int, count: int, batch: int, device: torch.device) -> Tensor:
    """Return consecutive positions `start`, ... for every sequence, shape [batch, count]."""
    return torch.arange(start, start + count, device=device).expand(batch, -1)
