"""Preallocated rows of one attention module, written by position and read as a prefix."""

import torch
from jaxtyping import Int
from torch import Tensor

from moa.rows import Rows


class RowBuffer:
    """Keys and values of one session.

    Args:
        batch: number of sequences.
        num_kv_heads: key/value heads.
        capacity: positions.
        head_dim: size of one head.
        like: a tensor with the dtype and device to use.
    """

    def __init__(
        self, batch: int, num_kv_heads: int, capacity: int, head_dim: int, like: Tensor
    ) -> None:
        shape = (batch, num_kv_heads, capacity, head_dim)
        # Zeros, not garbage: a NaN in a masked value row would poison every query.
        self._rows = Rows(like.new_zeros(shape), like.new_zeros(shape))

    def write(self, rows: Rows, slots: Int[Tensor, "batch rows"]) -> None:
        """Store rows at `slots`."""
        index = slots[:, None, :, None].expand_as(rows.keys)
        for buffer, new in zip(self._rows, rows, strict=True):
            buffer.scatter_(2, index, new)

    def prefix(self, count: int) -> Rows:
        """Return the first `count` rows, without copying."""
        return Rows(*(buffer[:, :, :count] for buffer in self._rows))

    def write_through(self, slots: Int[Tensor, "batch rows"], count: int) -> "WriteThrough":
        """Return a store that keeps new rows at `slots` and shows the first `count`."""
        return WriteThrough(self, slots, count)


class WriteThrough:
    """A `moa.rows.RowStore` over a buffer."""

    def __init__(self, buffer: RowBuffer, slots: Tensor, count: int) -> None:
        self.buffer, self.slots, self.count = buffer, slots, count

    def __call__(self, rows: Rows) -> Rows:
        """Store the rows and return everything that may be attended to."""
        self.buffer.write(rows, self.slots)
        return self.buffer.prefix(self.count)


def token_slots(start: int, count: int, batch: int, device: torch.device) -> Tensor:
    """Return consecutive positions `start`, ... for every sequence, shape [batch, count]."""
    return torch.arange(start, start + count, device=device).expand(batch, -1)
