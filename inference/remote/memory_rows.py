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

from inference.remote.messages import (
    MessageT,
    RowDtype,
    RowEncoding,
    TensorSpec,
    WireMessage,
    decode_frame,
    encode_frame,
)
from jakiro.target.int8 import GROUP, Int8Rows, num_groups, quantized_rows, restored_rows

MAX_ROWS = 256  # largest number of rows that are fetched at once

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
    def num_bytes(self) -> int:
        if self.encoding == "int8":
            return num_groups(sum(self._sizes)) * (GROUP + torch.float16.itemsize)
        return sum(self._sizes) * self._float.itemsize

    def encode(
        self, memory: Sequence[Float[Tensor, "1 _ tokens _"]]
    ) -> UInt8[np.ndarray, "tokens bytes"]:
        parts = [part[0].transpose(0, 1).flatten(1) for part in memory]
        values = torch.cat(parts, dim=1).cpu()
        if self.encoding != "int8":
            return _bytes_of(values.to(self._float))
        return np.concatenate([_bytes_of(part) for part in quantized_rows(values)], axis=1)

    def decode(
        self, rows: UInt8[np.ndarray, "tokens bytes"]
    ) -> tuple[Float[Tensor, "1 _ tokens _"], ...]:
        """Return the encoded memory of rows, in the dtype of this format."""
        values = self._values(rows).to(getattr(torch, self.dtype))
        parts = zip(values.split(self._sizes, dim=1), self.shapes, strict=True)
        return tuple(part.unflatten(1, shape).transpose(0, 1)[None] for part, shape in parts)

    def _values(self, rows: np.ndarray) -> Float[Tensor, "tokens values"]:
        if self.encoding != "int8":
            return _tensor_of(rows, self._float)
        width = sum(self._sizes)
        values, scales = np.split(rows, [num_groups(width) * GROUP], axis=1)
        quantized = Int8Rows(_tensor_of(values, torch.int8), _tensor_of(scales, torch.float16))
        return restored_rows(quantized, width)

    @property
    def _sizes(self) -> list[int]:
        return [heads * dim for heads, dim in self.shapes]

    @property
    def _float(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return torch.bfloat16 if self.encoding == "bf16" else dtype


def encode_with_rows(message: WireMessage, rows: UInt8[np.ndarray, "tokens bytes"]) -> bytes:
    return encode_frame(message, {_ROWS: rows})


def decode_with_rows(
    body: bytes, kind: type[MessageT]
) -> tuple[MessageT, UInt8[np.ndarray, "tokens bytes"]]:
    message, tensors = decode_frame(body, kind, _SPECS)
    return message, tensors[_ROWS]


def _bytes_of(values: Tensor) -> UInt8[np.ndarray, "tokens bytes"]:
    return values.contiguous().view(torch.uint8).numpy()


def _tensor_of(rows: np.ndarray, dtype: torch.dtype) -> Tensor:
    # a copy, because the bytes of a message are read-only
    return torch.from_numpy(rows.copy()).view(dtype)
