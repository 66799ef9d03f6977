"""The table of an import: each of our parameters with the tensors that it is made from."""

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from jakiro.errors import CheckpointError
from jakiro.exchange.checkpoint import DraftCheckpoint

Shape = tuple[int, ...]
Convert = Callable[[list[Tensor]], Tensor]
Part = Literal["embeddings", "head"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Conversion(NamedTuple):
    """One of our parameters.

    Attributes:
        theirs: names of the tensors that it is made from; empty for zeros.
    """

    ours: str
    theirs: tuple[str, ...]
    how: str
    convert: Convert


class TensorTable:
    """Accounts for every tensor of a drafter: it is used, compared, dropped or refused."""

    def __init__(self, checkpoint: DraftCheckpoint) -> None:
        self.checkpoint = checkpoint
        self.rows: list[Conversion] = []
        self.dropped: dict[str, str] = {}  # name -> reason
        self.copies: dict[str, Part] = {}  # copies of the target's tensors, to be compared
        self._left = set(checkpoint.tensors)
        for name in list(self._left):
            if name.endswith("rotary_emb.inv_freq"):
                self.drop(name, "computed from the config")

    def has(self, name: str) -> bool:
        """Return whether the drafter has a tensor of this name."""
        return name in self.checkpoint.tensors

    def shape(self, name: str) -> Shape:
        """Return the shape of a tensor."""
        if not self.has(name):
            raise self.unusable(f"a tensor {name}", "none")
        return tuple(self.checkpoint.tensors[name].shape)

    def matrix(self, name: str) -> tuple[int, int]:
        """Return the numbers of rows and columns of a matrix."""
        shape = self.shape(name)
        if len(shape) != 2 or 0 in shape:
            raise self.unusable(f"{name} with two dimensions", f"shape {list(shape)}")
        return shape[0], shape[1]

    def take(
        self,
        ours: str,
        theirs: Mapping[str, Shape],
        how: str = "unchanged",
        convert: Convert = lambda parts: parts[0],
    ) -> None:
        """Add a parameter that is made from tensors."""
        for name, expected in theirs.items():
            self._check(name, expected, _FLOATS, "numbers of 16, 32 or 64 bits")
            self._left.discard(name)
        self.rows.append(Conversion(ours, tuple(theirs), how, convert))

    def take_ids(self, ours: str, name: str, shape: Shape, how: str, convert: Convert) -> None:
        """Add ids of tokens that are made from a tensor of integers."""
        self._check(name, shape, _INTEGERS, "integers")
        self._left.discard(name)
        self.rows.append(Conversion(ours, (name,), how, convert))

    def read(self, name: str, shape: Shape) -> Tensor:
        """Return a small tensor of integers, which determines the conversion of others."""
        self._check(name, shape, _INTEGERS, "integers")
        return self.checkpoint.tensor(name).long()

    def _check(
        self, name: str, shape: Shape, dtypes: tuple[torch.dtype, ...], numbers: str
    ) -> None:
        """Raise an error unless the drafter has a tensor of this shape and type."""
        if (got := self.shape(name)) != shape:
            raise self.unusable(f"{name} of shape {list(shape)}", f"shape {list(got)}")
        if (dtype := self.checkpoint.tensors[name].dtype) not in dtypes:
            raise self.unusable(f"{numbers} in {name}", dtype)

    def zeros(self, ours: str, shape: Shape) -> None:
        """Add a parameter of zeros that the published drafter does not have."""
        self.rows.append(Conversion(ours, (), "zeros", lambda _parts: torch.zeros(shape)))

    def drop(self, name: str, reason: str) -> None:
        """Leave out a tensor."""
        self._left.discard(name)
        self.dropped[name] = reason

    def compare(self, name: str, part: Part) -> None:
        """Leave out a tensor if there is one of this name, because the target has the same."""
        if self.has(name):
            self.drop(name, f"compared with the target's {part}")
            self.copies[name] = part

    def finish(self) -> None:
        """Raise an error if a tensor is neither used nor dropped."""
        if self._left:
            names = sorted(self._left)
            raise self.unusable(
                "only tensors of this architecture", f"{len(names)} others: {', '.join(names[:4])}"
            )

    def converted(self) -> dict[str, Tensor]:
        """Return our parameters, in the dtype of the tensors."""
        tensor, rows = self.checkpoint.tensor, self.rows
        made = {row.ours: row.convert([tensor(name) for name in row.theirs]) for row in rows}
        dtypes = [
            made[row.ours].dtype
            for row in rows
            if row.theirs and made[row.ours].is_floating_point()
        ]
        dtype = reduce(torch.promote_types, dtypes)
        return {
            name: part.to(dtype) if part.is_floating_point() else part
            for name, part in made.items()
        }

    def unusable(self, expected: str, got: object, remedy: str | None = None) -> CheckpointError:
        """Return the error for a drafter that cannot be imported."""
        return cannot_import(self.checkpoint.source, expected, got, remedy)


def cannot_import(
    source: str, expected: str, got: object, remedy: str | None = None
) -> CheckpointError:
    """Return the error for a drafter that cannot be imported."""
    return CheckpointError(
        f"{source} cannot be imported",
        expected=expected,
        got=got,
        remedy=remedy or "see docs/guides/exchange.md for the drafters that can be imported",
    )


def rows_joined(parts: list[Tensor]) -> Tensor:
    """Return matrices with the same number of columns, joined along their rows."""
    return torch.cat(parts)


def stacked_transposed(parts: list[Tensor]) -> Tensor:
    """Return a stack [matrices, in, out] of matrices [out, in]."""
    return torch.stack([part.T for part in parts]).contiguous()
