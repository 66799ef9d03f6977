"""The memory of tokens as bytes."""

import numpy as np
import pytest
import torch

from inference.remote.memory_rows import RowFormat
from inference.remote.messages import RowDtype, RowEncoding

SHAPES = ((2, 8), (2, 8), (1, 32))


def _memory(dtype: RowDtype, tokens: int = 5) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(1)
    own: torch.dtype = getattr(torch, dtype)
    return tuple(
        torch.randn(1, heads, tokens, dim, generator=random).to(own) for heads, dim in SHAPES
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_exact_rows_keep_every_bit(dtype: RowDtype) -> None:
    memory, form = _memory(dtype), RowFormat(SHAPES, dtype)
    rows = form.encode(memory)
    assert rows.shape == (5, form.num_bytes)
    for found, expected in zip(form.decode(rows), memory, strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("encoding", "error"), [("bf16", 0.01), ("int8", 0.02)])
def test_shorter_rows_are_close(encoding: RowEncoding, error: float) -> None:
    memory, form = _memory("float32"), RowFormat(SHAPES, "float32", encoding)
    rows = form.encode(memory)
    assert form.num_bytes == rows.shape[1] < RowFormat(SHAPES, "float32").num_bytes
    for found, expected in zip(form.decode(rows), memory, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, atol=2 * error, rtol=error)


@pytest.mark.parametrize("encoding", ["exact", "bf16", "int8"])
def test_rows_of_several_calls_are_those_of_one(encoding: RowEncoding) -> None:
    memory, form = _memory("float32"), RowFormat(SHAPES, "float32", encoding)
    parts = [form.encode([own[:, :, a:b] for own in memory]) for a, b in ((0, 2), (2, 2), (2, 5))]
    assert np.array_equal(np.concatenate(parts), form.encode(memory))
