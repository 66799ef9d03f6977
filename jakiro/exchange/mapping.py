"""The correspondence of our parameters with published tensors, for import and for export.

A layout is a list of rows that follows from a drafter's settings. An import reads it from right to
left, with an account of every tensor, and an export from left to right.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from jakiro.drafter_settings import TrunkSettings
from jakiro.errors import CheckpointError
from jakiro.exchange.checkpoint import DraftCheckpoint
from jakiro.target.attention_shape import AttentionShape

Shape = tuple[int, ...]
Part = Literal["embeddings", "head"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Transform(NamedTuple):
    """How a parameter is made from published tensors, and these from the parameter.

    Attributes:
        split: function from a parameter and the shapes of the published tensors to these; None in
            layouts that are only imported.
    """

    how: str
    join: Callable[[list[Tensor]], Tensor]
    split: Callable[[Tensor, list[Shape]], Sequence[Tensor]] | None = None


COPY = Transform("unchanged", lambda parts: parts[0], lambda part, _: [part])
JOIN_ROWS = Transform(
    "rows joined", torch.cat, lambda part, shapes: part.split([shape[0] for shape in shapes])
)
STACK = Transform("stacked", torch.stack, lambda part, _: part.unbind())
TRANSPOSE = Transform(
    "transposed",
    lambda parts: torch.stack([part.T for part in parts]).contiguous(),
    lambda part, _: [matrix.T for matrix in part],
)


class Row(NamedTuple):
    """One of our parameters, and the tensors that it is in a published layout, with their shapes.

    Attributes:
        theirs: shapes by name; empty if the layout does not have the parameter.
    """

    ours: str
    theirs: Mapping[str, Shape]
    transform: Transform = COPY

    def export(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the published tensors of a parameter."""
        assert self.transform.split is not None, "the layout is exported"
        parts = self.transform.split(parameter, list(self.theirs.values()))
        return dict(zip(self.theirs, parts, strict=True))


def zeros(ours: str, *shape: int) -> Row:
    """Return the row of a parameter that a layout does not have, and that is zero in an import."""
    return Row(ours, {}, Transform("zeros", lambda _: torch.zeros(shape)))


def attention_rows(
    prefix: str, trunk: TrunkSettings, width: int, hidden: int, ours: str = "trunk.self_attention"
) -> Iterator[Row]:
    """Yield self-attention as transformers names it, whose inputs have a width."""
    heads = AttentionShape.model_validate(trunk.geometry)
    dim = heads.head_dim
    sizes = {"q": heads.num_heads * dim, "k": heads.num_kv_heads * dim}
    rows = {f"{prefix}{name}_proj": size for name, size in (sizes | {"v": sizes["k"]}).items()}
    weights = {f"{name}.weight": (size, width) for name, size in rows.items()}
    yield Row(f"{ours}.project.weight", weights, JOIN_ROWS)
    yield Row(f"{ours}.output.weight", {f"{prefix}o_proj.weight": (hidden, sizes["q"])})
    if trunk.qk_norm:
        for name in ("query", "key"):
            yield Row(f"{ours}.{name}_norm.weight", {f"{prefix}{name[0]}_norm.weight": (dim,)})
    if trunk.attention_bias != "none":
        biases = {f"{name}.bias": (size,) for name, size in rows.items()}
        yield Row(f"{ours}.project.bias", biases, JOIN_ROWS)
    if trunk.attention_bias == "all":
        yield Row(f"{ours}.output.bias", {f"{prefix}o_proj.bias": (hidden,)})


def expert_rows(prefixes: Sequence[str], hidden: int, inner: int) -> Iterator[Row]:
    """Yield the feed-forward networks of one or several experts."""
    gates = [f"{prefix}{name}_proj.weight" for prefix in prefixes for name in ("gate", "up")]
    yield Row("experts.gate_up.weight", dict.fromkeys(gates, (inner, hidden)), JOIN_ROWS)
    downs = [f"{prefix}down_proj.weight" for prefix in prefixes]
    yield Row("experts.down", dict.fromkeys(downs, (hidden, inner)), TRANSPOSE)


def feed_forward_rows(ours: str, prefix: str, hidden: int, inner: int) -> Iterator[Row]:
    """Yield a feed-forward network, without its norm."""
    shapes = {f"{prefix}{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    yield Row(f"{ours}.gate_up.weight", shapes, JOIN_ROWS)
    yield Row(f"{ours}.down.weight", {f"{prefix}down_proj.weight": (hidden, inner)})


class TensorTable:
    """Accounts for every tensor of a drafter: it is used, compared, dropped or refused."""

    def __init__(self, checkpoint: DraftCheckpoint) -> None:
        self.checkpoint = checkpoint
        self.rows: list[Row] = []
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
        if not self.has(name):
            raise self.unusable(f"a tensor {name}", "none")
        return tuple(self.checkpoint.tensors[name].shape)

    def matrix(self, name: str) -> tuple[int, int]:
        """Return the numbers of rows and columns of a matrix."""
        shape = self.shape(name)
        if len(shape) != 2 or 0 in shape:
            raise self.unusable(f"{name} with two dimensions", f"shape {list(shape)}")
        return shape[0], shape[1]

    def take(self, rows: Iterable[Row]) -> None:
        """Add parameters that are made from tensors; from integers for `draft_ids`."""
        for row in rows:
            for name, shape in row.theirs.items():
                self._check(name, shape, is_integer=row.ours == "draft_ids")
                self._left.discard(name)
            self.rows.append(row)

    def read(self, name: str, shape: Shape) -> Tensor:
        """Return a small tensor of integers, which determines the conversion of others."""
        self._check(name, shape, is_integer=True)
        return self.checkpoint.tensor(name).long()

    def _check(self, name: str, shape: Shape, is_integer: bool) -> None:
        """Raise an error unless the drafter has a tensor of this shape and type."""
        if (got := self.shape(name)) != shape:
            raise self.unusable(f"{name} of shape {list(shape)}", f"shape {list(got)}")
        dtype = self.checkpoint.tensors[name].dtype
        if dtype not in (_INTEGERS if is_integer else _FLOATS):
            numbers = "integers" if is_integer else "numbers of 16, 32 or 64 bits"
            raise self.unusable(f"{numbers} in {name}", dtype)

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
        tensor = self.checkpoint.tensor
        made = {row.ours: row.transform.join(list(map(tensor, row.theirs))) for row in self.rows}
        parts = [made[row.ours] for row in self.rows if row.theirs]
        dtype = reduce(torch.promote_types, [p.dtype for p in parts if p.is_floating_point()])
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
