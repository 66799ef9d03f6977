"""Key and value rows: what an attention module keeps of each position it can be asked about."""

from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor


class Rows(NamedTuple):
    """Keys (rotated) and values of some positions."""

    keys: Float[Tensor, "batch kv_heads rows dim"]
    values: Float[Tensor, "batch kv_heads rows dim"]


@runtime_checkable
class RowStore(Protocol):
    """Takes the rows of the tokens now being read and returns all rows they may attend to."""

    def __call__(self, rows: Rows) -> Rows: ...


def only_these(rows: Rows) -> Rows:
    """The store of a pass over whole sequences: tokens attend to each other, to nothing older."""
    return rows
