"""Preallocated rows of tokens, written by position and read as a prefix."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from jakiro.slots import bucketed, grown, in_place, kept, write_rows
from moa.rows import Rows


class RowBuffer:
    """What one session keeps of each token, such as keys and values; a row's slot is its position.

    Args:
        batch: number of sequences.
        capacity: positions; rounded up to whole buckets.
        shapes: heads and size of a head, of each tensor that is kept.
        like: a tensor with the dtype and device to use.
    """

    def __init__(
        self, batch: int, capacity: int, shapes: Sequence[tuple[int, int]], like: Tensor
    ) -> None:
        # Zeros, not garbage: a NaN in a masked value row would poison every query.
        self._tensors = tuple(
            in_place(like.new_zeros((batch, heads, bucketed(capacity), dim)))
            for heads, dim in shapes
        )

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return self._tensors[0].shape[2]

    def write(
        self,
        rows: Sequence[Float[Tensor, "batch _ rows _"]],
        slots: Int[Tensor, "batch rows"],
    ) -> None:
        """Store rows at `slots`."""
        for buffer, new in zip(self._tensors, rows, strict=True):
            write_rows(buffer, new, slots)

    def prefix(self, count: int) -> tuple[Float[Tensor, "batch _ slots _"], ...]:
        """Return the first `count` rows, rounded up to whole buckets, without copying."""
        count = min(bucketed(count), self.capacity)
        return tuple(buffer[:, :, :count] for buffer in self._tensors)

    def last_at(self, slots: Int[Tensor, "batch rows"]) -> Float[Tensor, "batch _ rows _"]:
        """Return the rows at `slots` of the last tensor, copied."""
        last = self._tensors[-1]
        index = slots[:, None, :, None].expand(-1, last.shape[1], -1, last.shape[3])
        return last.gather(2, index)

    def write_through(self, slots: Int[Tensor, "batch rows"], count: int) -> "WriteThrough":
        """Return a store that keeps new keys and values at `slots` and shows the first `count`."""
        return WriteThrough(self, slots, count)

    def keep(self, places: Sequence[int]) -> None:
        """Drop all sequences but those at these places, which are ascending."""
        self._tensors = tuple(kept(buffer, places, dim=0) for buffer in self._tensors)

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` rows, keeping those that are there."""
        if capacity > self.capacity:
            self._tensors = tuple(grown(buffer, bucketed(capacity)) for buffer in self._tensors)


class WriteThrough:
    """A `moa.rows.RowStore` over a buffer of keys and values.

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
        return Rows(*self.buffer.prefix(self.count))


def token_slots(start: int, count: int, batch: int, device: torch.device) -> Tensor:
    """Return consecutive positions `start`, ... for every sequence, shape [batch, count]."""
    return torch.arange(start, start + count, device=device).expand(batch, -1)
