"""The memory of verified tokens as bytes: one row per token, with the values that a drafter reads.

The server encodes memory from the target's cache, and the device drafts with it. Rows may lose
precision on their way: they change which tokens are drafted, but never the text's distribution.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from inference.remote.errors import MessageError
from inference.remote.frames import TensorSpec, decode_frame, encode_frame
from inference.remote.messages import MessageT, RowDtype, RowEncoding, WireMessage
from jakiro.target.int8_rows import GROUP, Int8Rows, num_groups, quantized_rows, restored_rows

_ROWS = "rows"  # name of the tensor
_SPECS = {_ROWS: TensorSpec(np.uint8, 2)}


class RowFormat(NamedTuple):
    """The form of the rows of one session.

    Attributes:
        encoding: exact (in this dtype), bf16, or int8 (with a scale for each `GROUP` values).
    """

    shapes: tuple[tuple[int, int], ...]
    dtype: RowDtype
    encoding: RowEncoding = "exact"

    @property
    def num_values(self) -> int:
        """The number of values of a row."""
        return sum(heads * dim for heads, dim in self.shapes)

    @property
    def num_bytes(self) -> int:
        """The size of a row."""
        if self.encoding == "int8":
            return num_groups(self.num_values) * (GROUP + torch.float16.itemsize)
        return self.num_values * self._float.itemsize

    def encoded(
        self, memory: Sequence[Float[Tensor, "1 _ tokens _"]]
    ) -> UInt8[np.ndarray, "tokens bytes"]:
        """Return the rows of consecutive tokens."""
        parts = [part[0].transpose(0, 1).flatten(1) for part in memory]
        values = torch.cat(parts, dim=1).cpu()
        if self.encoding != "int8":
            return _bytes_of(values.to(self._float))
        own = quantized_rows(values)
        return np.concatenate([_bytes_of(own.values), _bytes_of(own.scales)], axis=1)

    def decoded(
        self, rows: UInt8[np.ndarray, "tokens bytes"]
    ) -> tuple[Float[Tensor, "1 _ tokens _"], ...]:
        """Return the encoded memory of rows, in the dtype of this format."""
        values = self._values(rows).to(getattr(torch, self.dtype))
        sizes = [heads * dim for heads, dim in self.shapes]
        parts = zip(values.split(sizes, dim=1), self.shapes, strict=True)
        return tuple(part.unflatten(1, shape).transpose(0, 1)[None] for part, shape in parts)

    def _values(self, rows: np.ndarray) -> Float[Tensor, "tokens values"]:
        if self.encoding != "int8":
            return _tensor_of(rows, self._float)
        end = num_groups(self.num_values) * GROUP
        own = Int8Rows(
            _tensor_of(rows[:, :end], torch.int8), _tensor_of(rows[:, end:], torch.float16)
        )
        return restored_rows(own, self.num_values)

    @property
    def _float(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return torch.bfloat16 if self.encoding == "bf16" else found


def encode_with_rows(message: WireMessage, rows: UInt8[np.ndarray, "tokens bytes"]) -> bytes:
    """Return a message and rows as bytes."""
    return encode_frame(message, {_ROWS: rows})


def decode_with_rows(
    body: bytes, kind: type[MessageT], num_bytes: int
) -> tuple[MessageT, UInt8[np.ndarray, "tokens bytes"]]:
    """Return the message and the rows in bytes from another machine."""
    message, tensors = decode_frame(body, kind, _SPECS)
    rows = tensors[_ROWS]
    if rows.shape[1] != num_bytes:
        raise MessageError(
            "wrong_rows",
            "the rows of memory have another size",
            expected=f"{num_bytes} bytes",
            got=f"{rows.shape[1]} bytes",
        )
    return message, rows


def _bytes_of(values: Tensor) -> UInt8[np.ndarray, "tokens bytes"]:
    """Return the little-endian bytes of each row."""
    count = len(values)
    size = values.shape[1] * values.dtype.itemsize
    return values.contiguous().view(torch.uint8).numpy().reshape(count, size)


def _tensor_of(rows: np.ndarray, dtype: torch.dtype) -> Tensor:
    width = rows.shape[1] // dtype.itemsize
    # a copy, because the bytes of a message are read-only
    return torch.from_numpy(rows.copy()).view(dtype).reshape(len(rows), width)
