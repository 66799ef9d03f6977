"""What the queries of a draft tree may know of verified tokens."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from inference.trees.builder import Frontier
from jakiro.drafter import JakiroDrafter
from jakiro.experts import ExpertsOutput
from jakiro.target.cache import SlotCache, bucketed, grown, in_place, selected, write_kv
from jakiro.target.tail import TargetTail
from moa.attention import KV
from moa.trunk import TrunkInputs


class KVBuffer:
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
            write_kv(buffer, new, slots)

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

    def select_sequences(self, places: Sequence[int]) -> None:
        """Drop all sequences but those at these places, which are ascending."""
        self._tensors = tuple(selected(buffer, places, dim=0) for buffer in self._tensors)

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` rows, keeping those that are there."""
        if capacity > self.capacity:
            self._tensors = tuple(grown(buffer, bucketed(capacity)) for buffer in self._tensors)


class WriteThrough:
    """A `moa.attention.RowStore` over a buffer of keys and values.

    Args:
        buffer: where rows go.
        slots: of the new rows.
        count: rows to show; `self.count` is that rounded up to whole buckets.
    """

    def __init__(self, buffer: KVBuffer, slots: Tensor, count: int) -> None:
        self.buffer, self.slots = buffer, slots
        self.count = min(bucketed(count), buffer.capacity)

    def __call__(self, rows: KV) -> KV:
        """Store the rows and return everything that may be attended to."""
        self.buffer.write(rows, self.slots)
        return KV(*self.buffer.prefix(self.count))


def token_slots(start: int, count: int, batch: int, device: torch.device) -> Tensor:
    """Return consecutive positions `start`, ... for every sequence, shape [batch, count]."""
    return torch.arange(start, start + count, device=device).expand(batch, -1)


class TreeTrunkInputs:
    """Evidence for the passes of a drafter over trees below the roots.

    Every query sees the memory of all verified tokens. The root reads the feature of the last
    verified token, a node what was predicted at its parent.

    Args:
        model: the drafter; only what its trunk reads is looked up.
        kept: what it keeps of verified tokens, at their positions.
        lengths: number of verified tokens of each sequence.
        highest: the largest of them, known on the host.
    """

    def __init__(
        self, model: JakiroDrafter, kept: KVBuffer, lengths: Int[Tensor, " batch"], highest: int
    ) -> None:
        self._kept = kept
        self._reads_features = model.trunk.feature_input is not None
        self._rows: KV | None = None
        if model.trunk.cross_attention is not None:
            self._rows = KV(*kept.prefix(highest)[:2])
            slots = token_slots(0, self._rows.keys.shape[2], 1, lengths.device)
            self._is_verified = slots < lengths[:, None]

    def of(
        self,
        positions: Int[Tensor, "batch queries"],
        frontier: Frontier | None,
        last: ExpertsOutput | None,
    ) -> TrunkInputs:
        """Return the evidence for the nodes of a frontier.

        Args:
            positions: of the queries.
            frontier: the queries, or None for the root.
            last: what the drafter said at their parents.
        """
        previous = self._previous(positions, frontier, last) if self._reads_features else None
        if self._rows is None:
            return TrunkInputs(previous)
        mask = self._is_verified[:, None, None].expand(-1, -1, positions.shape[1], -1)
        return TrunkInputs(previous, self._rows, mask)

    def _previous(
        self, positions: Tensor, frontier: Frontier | None, last: ExpertsOutput | None
    ) -> Float[Tensor, "batch queries hidden"]:
        if frontier is None or last is None:
            return previous_features(self._kept, positions)
        predicted = last.mean_feature
        return predicted.gather(1, frontier.origin[:, :, None].expand(-1, -1, predicted.shape[2]))


def previous_features(
    kept: KVBuffer, positions: Int[Tensor, "batch rows"]
) -> Float[Tensor, "batch rows hidden"]:
    """Return the kept features of the tokens before `positions`; zeros before the first."""
    features = kept.last_at((positions - 1).clamp(min=0))
    return torch.where(positions[:, :, None] > 0, features.squeeze(1), 0.0)


class DrafterCache:
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
        self.own = KVBuffer(batch, capacity, attention.kv_shapes, like)
        self.kept = KVBuffer(batch, capacity, model.memory_shapes, like)
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
        count = len(self.model.memory_shapes)
        self.kept.write(kept[:count], positions)
        self.own.write(self._own_kv(embeddings, positions), positions)
        if self.tail is not None and self.tail_cache is not None:
            self.tail.store(self.tail_cache, tuple(kept[count:]), positions)

    def select_sequences(self, places: Sequence[int]) -> None:
        """Drop all sequences but those at these places, which are ascending."""
        for rows in self._all:
            rows.select_sequences(places)

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` slots."""
        for rows in self._all:
            rows.reserve(capacity)

    @property
    def _all(self) -> list[KVBuffer | SlotCache]:
        rows: list[KVBuffer | SlotCache] = [self.own, self.kept]
        return rows if self.tail_cache is None else [*rows, self.tail_cache]

    def _own_kv(self, embeddings: Tensor, positions: Tensor) -> KV:
        trunk = self.model.trunk
        if trunk.feature_input is None:
            return trunk.kv(embeddings, positions)
        return trunk.kv(embeddings, positions, previous_features(self.kept, positions))
