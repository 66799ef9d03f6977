"""Rows of keys or values in preallocated slots: written in place, kept, and grown."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

BUCKET = 64  # attention reads whole buckets of slots, so shapes change rarely


def bucketed(count: int) -> int:
    """Return `count` rounded up to whole buckets."""
    return -(-count // BUCKET) * BUCKET


def in_place(buffer: Tensor) -> Tensor:
    """Return a buffer that compiled code writes to, told that it stays where it is.

    CUDA graphs would otherwise copy what they change, or not be used at all.
    """
    if buffer.is_cuda:
        torch._dynamo.mark_static_address(buffer, guard=False)
    return buffer


def write_rows(
    buffer: Float[Tensor, "batch heads slots dim"],
    rows: Float[Tensor, "batch heads rows dim"],
    slots: Int[Tensor, "batch rows"],
) -> None:
    """Store rows of each sequence at its slots, in place."""
    if torch.compiler.is_compiling():  # a compiled scatter would copy the whole buffer
        sequence = torch.arange(len(buffer), device=buffer.device)[:, None]
        buffer[sequence, :, slots] = rows.transpose(1, 2)
    else:
        buffer.scatter_(2, slots[:, None, :, None].expand_as(rows), rows)


def kept(buffer: Tensor, places: Sequence[int], dim: int) -> Tensor:
    """Return the part of a buffer that holds these sequences, moved together in place.

    Args:
        buffer: with the sequences along `dim`.
        places: of the sequences to keep, ascending.
        dim: of the sequences.
    """
    for destination, place in enumerate(places):
        if destination != place:
            buffer.select(dim, destination).copy_(buffer.select(dim, place))
    return buffer.narrow(dim, 0, len(places))


def grown(buffer: Float[Tensor, "*batch slots dim"], capacity: int) -> Tensor:
    """Return a copy of a buffer with room for more slots."""
    larger = buffer.new_zeros((*buffer.shape[:-2], capacity, buffer.shape[-1]))
    larger[..., : buffer.shape[-2], :] = buffer
    return larger
