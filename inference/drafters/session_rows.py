"""The preallocated rows of a drafting session: the trunk's own, what it reads, and the tail's."""

from collections.abc import Sequence

from jaxtyping import Float, Int
from torch import Tensor

from inference.drafters.evidence import previous_features
from inference.row_buffer import RowBuffer
from jakiro.cache import SlotCache
from jakiro.drafter import JakiroDrafter
from jakiro.target_tail import TargetTail
from moa.rows import Rows


class SessionRows:
    """Rows of final tokens stand at their positions; those of a tree take the slots behind.

    Args:
        model: the drafter.
        tail: the target's last layers, where the drafter's output goes through them.
        batch: number of sequences.
        capacity: slots of each sequence.
    """

    def __init__(
        self, model: JakiroDrafter, tail: TargetTail | None, batch: int, capacity: int
    ) -> None:
        attention = model.trunk.self_attention
        like = attention.output.weight
        self.model = model
        self.tail = tail
        self.own = RowBuffer(batch, capacity, attention.row_shapes, like)
        self.kept = RowBuffer(batch, capacity, model.kept_shapes, like)
        self.tail_cache: SlotCache | None = None
        if tail is not None:
            self.tail_cache = tail.new_cache(batch, capacity)

    @property
    def capacity(self) -> int:
        """Slots of each sequence."""
        return self.own.capacity

    def write(
        self,
        embeddings: Float[Tensor, "batch verified hidden"],
        kept: Sequence[Float[Tensor, "batch _ verified _"]],
        positions: Int[Tensor, "batch verified"],
    ) -> None:
        """Take in verified tokens.

        Args:
            embeddings: of the tokens.
            kept: what the encoder made of them: what the trunk reads, then rows of the tail.
            positions: where they stand.
        """
        count = len(self.model.kept_shapes)
        self.kept.write(kept[:count], positions)
        self.own.write(self._own_rows(embeddings, positions), positions)
        if self.tail is not None and self.tail_cache is not None:
            self.tail.keep(self.tail_cache, tuple(kept[count:]), positions)

    def keep(self, places: Sequence[int]) -> None:
        """Drop all sequences but those at these places, which are ascending."""
        for rows in self._all:
            rows.keep(places)

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` slots."""
        for rows in self._all:
            rows.reserve(capacity)

    @property
    def _all(self) -> list[RowBuffer | SlotCache]:
        rows: list[RowBuffer | SlotCache] = [self.own, self.kept]
        return rows if self.tail_cache is None else [*rows, self.tail_cache]

    def _own_rows(self, embeddings: Tensor, positions: Tensor) -> Rows:
        trunk = self.model.trunk
        if trunk.feature_input is None:
            return trunk.rows(embeddings, positions)
        return trunk.rows(embeddings, positions, previous_features(self.kept, positions))
