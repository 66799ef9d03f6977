"""The trained drafter's cache of keys, values and features of verified tokens and tree nodes."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from inference.trees.builder import TreeLevel
from jakiro.drafter import JakiroDrafter
from jakiro.experts import ExpertsOutput
from jakiro.target.cache import SlotCache, in_place, write_kv
from jakiro.target.sequence_storage import SequenceStorage, SequenceStorages, bucketed
from jakiro.target.tail import TargetTail
from moa.attention import KV
from moa.trunk import TrunkInputs


class KVBuffer(SequenceStorages):
    """A buffer of several tensors, such as keys and values, with one slot for each token."""

    def __init__(
        self, batch: int, capacity: int, shapes: Sequence[tuple[int, int]], like: Tensor
    ) -> None:
        # Uninitialized memory may contain NaN, which would spread to every query despite the mask.
        self._storages = tuple(
            SequenceStorage(like.new_zeros((batch, heads, bucketed(capacity), dim)), dim=0)
            for heads, dim in shapes
        )
        self._update()

    def write(
        self,
        kept: Sequence[Float[Tensor, "batch _ tokens _"]],
        slots: Int[Tensor, "batch tokens"],
        start: int | None = None,
    ) -> None:
        for buffer, new in zip(self._tensors, kept, strict=True):
            write_kv(buffer, new, slots, start=start)

    def prefix(self, count: int) -> tuple[Float[Tensor, "batch _ slots _"], ...]:
        """Return views of the first `count` slots, where `count` is rounded up to whole buckets."""
        count = min(bucketed(count), self.capacity)
        return tuple(buffer[:, :, :count] for buffer in self._tensors)

    def last_at(self, slots: Int[Tensor, "batch tokens"]) -> Float[Tensor, "batch _ tokens _"]:
        """Return a copy of the entries of the last kept tensor at `slots`."""
        last = self._tensors[-1]
        index = slots[:, None, :, None].expand(-1, last.shape[1], -1, last.shape[3])
        return last.gather(2, index)

    def write_through(
        self, slots: Int[Tensor, "batch tokens"], count: int, start: int | None = None
    ) -> "WriteThrough":
        """Return a key/value store that writes new tokens to this buffer."""
        return WriteThrough(self, slots, count, start)

    def _update(self) -> None:
        self._tensors = tuple(in_place(storage.live) for storage in self._storages)


class WriteThrough:
    """A `moa.attention.KVStore` over a buffer of keys and values."""

    def __init__(self, buffer: KVBuffer, slots: Tensor, count: int, start: int | None) -> None:
        self.buffer, self.slots, self.start = buffer, slots, start
        self.count = min(bucketed(count), buffer.capacity)

    def __call__(self, kv: KV) -> KV:
        """Store keys and values, and return all keys and values that queries may attend to."""
        self.buffer.write(kv, self.slots, self.start)
        return KV(*self.buffer.prefix(self.count))


def token_slots(start: int, count: int, batch: int, device: torch.device) -> Tensor:
    """Return consecutive slots from `start` on for every sequence, with shape [batch, count]."""
    return torch.arange(start, start + count, device=device).expand(batch, -1)


class TreeTrunkInputs:
    """The trunk inputs of a drafter's passes over trees below the roots.

    Every query attends to the memory of all verified tokens. The input of the root contains the
    feature of the last verified token; the input of any other node contains the feature that was
    predicted at its parent.
    """

    def __init__(
        self,
        model: JakiroDrafter,
        kept: KVBuffer,
        tokens: KVBuffer | None,
        lengths: Int[Tensor, " batch"],
        highest: int,
    ) -> None:
        self._kept, self._tokens, self._num_earlier = kept, tokens, model.num_earlier
        self._recent: Tensor | None = None  # embeddings of the last tokens of each branch
        self._reads_features = model.trunk.feature_input is not None
        self._memory: tuple[KV, ...] = ()
        if count := len(model.trunk.memory_shapes):
            kept_kv = kept.prefix(highest)[:count]
            self._memory = tuple(map(KV, kept_kv[::2], kept_kv[1::2]))
            slots = token_slots(0, self._memory[0].keys.shape[2], 1, lengths.device)
            self._is_verified = slots < lengths[:, None]

    def of(
        self,
        embeddings: Float[Tensor, "batch queries hidden"],
        positions: Int[Tensor, "batch queries"],
        frontier: TreeLevel | None,
        last: ExpertsOutput | None,
    ) -> TrunkInputs:
        """Return the trunk inputs of the nodes of a frontier."""
        previous = self._previous(positions, frontier, last) if self._reads_features else None
        earlier = self._earlier(embeddings, positions, frontier)
        if not self._memory:
            return TrunkInputs(previous, earlier=earlier)
        mask = self._is_verified[:, None, None].expand(-1, -1, positions.shape[1], -1)
        return TrunkInputs(previous, self._memory, mask, earlier)

    def _earlier(
        self, embeddings: Tensor, positions: Tensor, frontier: TreeLevel | None
    ) -> Float[Tensor, "batch queries earlier hidden"] | None:
        """Return the embeddings of the tokens before each node, on the path to this node."""
        if self._tokens is None:
            return None
        if frontier is None or self._recent is None:
            earlier = earlier_embeddings(self._tokens, positions, self._num_earlier)
        else:
            parents = frontier.origin[:, :, None, None].expand(-1, -1, *self._recent.shape[2:])
            earlier = self._recent.gather(1, parents)
        self._recent = torch.cat((embeddings.unsqueeze(2), earlier[:, :, :-1]), dim=2)
        return earlier

    def _previous(
        self, positions: Tensor, frontier: TreeLevel | None, last: ExpertsOutput | None
    ) -> Float[Tensor, "batch queries hidden"]:
        if frontier is None or last is None:
            return previous_features(self._kept, positions)
        predicted = last.mean_feature
        return predicted.gather(1, frontier.origin[:, :, None].expand(-1, -1, predicted.shape[2]))


def previous_features(
    kept: KVBuffer, positions: Int[Tensor, "batch tokens"]
) -> Float[Tensor, "batch tokens hidden"]:
    """Return the kept features of the tokens before `positions`; zeros before the first token.

    Args:
        kept: tensors kept for verified tokens; the last tensor contains features.
    """
    features = kept.last_at((positions - 1).clamp(min=0))
    return torch.where(positions[:, :, None] > 0, features.squeeze(1), 0.0)


def earlier_embeddings(
    tokens: KVBuffer, positions: Int[Tensor, "batch tokens"], count: int
) -> Float[Tensor, "batch tokens count hidden"]:
    """Return the kept embeddings of the `count` tokens before `positions`, the last one first.

    Embeddings before the first token are zeros.
    """
    earlier = [previous_features(tokens, positions - back) for back in range(count)]
    return torch.stack(earlier, dim=2)


class DrafterCache:
    """All caches of a session, which contain verified tokens followed by tree nodes.

    The slot of a verified token is its position.

    Args:
        tail: last layers of the target, which process the drafter's output; None if the drafter
            does not use these layers.
    """

    def __init__(
        self, model: JakiroDrafter, tail: TargetTail | None, batch: int, capacity: int
    ) -> None:
        like = next(model.parameters())
        self.model = model
        self.tail = tail
        # keys and values of each layer of the trunk's self-attention
        self.layers = [KVBuffer(batch, capacity, shapes, like) for shapes in model.trunk.kv_shapes]
        self.kept = KVBuffer(batch, capacity, model.memory_shapes, like)
        self.tokens: KVBuffer | None = None  # embeddings
        if model.num_earlier:
            shapes = [(1, model.config.target_record.hidden_size)]
            self.tokens = KVBuffer(batch, capacity, shapes, like)
        self.tail_cache: SlotCache | None = None
        if tail is not None:
            self.tail_cache = tail.new_cache(batch, capacity)

    @property
    def capacity(self) -> int:
        return self.kept.capacity

    def write(
        self,
        embeddings: Float[Tensor, "batch verified hidden"],
        kept: Sequence[Float[Tensor, "batch _ verified _"]],
        positions: Int[Tensor, "batch verified"],
        highest: int,
        start: int | None = None,
    ) -> None:
        """Add verified tokens.

        Args:
            start: first position, if the positions of all sequences are the same and follow each
                other.
            kept: encoded memory: the tensors that the trunk reads, followed by those that the
                target's last layers read.
        """
        count = len(self.model.memory_shapes)
        self.kept.write(kept[:count], positions, start)
        if self.tokens is not None:
            self.tokens.write((embeddings.unsqueeze(1),), positions, start)
        inputs = self._inputs(positions)
        if len(self.layers) > 1:
            self._run_layers(embeddings, positions, highest, inputs)
        elif self.layers:
            kv = self.model.trunk.kv(embeddings, positions, inputs.previous, inputs.earlier)
            self.layers[0].write(kv, positions, start)
        if self.tail is not None and self.tail_cache is not None:
            self.tail.store(self.tail_cache, tuple(kept[count:]), positions)

    def write_through(
        self, slots: Int[Tensor, "batch tokens"], count: int, start: int | None = None
    ) -> tuple[WriteThrough, ...]:
        """Return a store of new keys and values for each layer of the trunk's self-attention."""
        return tuple(layer.write_through(slots, count, start) for layer in self.layers)

    def num_visible(self, count: int) -> int:
        """Return the number of slots in the stores for queries that may attend to `count` slots."""
        return min(bucketed(count), self.capacity)

    def select_sequences(
        self, indices: Sequence[int], num_used: Sequence[int] | None = None
    ) -> None:
        for cache in self._all:
            cache.select_sequences(indices, num_used)

    def show_rows(self, count: int, num_used: int = 0) -> None:
        """Use the first rows, as `SequenceStorage.show` does."""
        for cache in self._all:
            cache.show_rows(count, num_used)

    def append_sequences(self, other: "DrafterCache") -> None:
        """Add copies of the sequences of another cache of the same drafter."""
        for buffer, added in zip(self.buffers, other.buffers, strict=True):
            buffer.append_sequences(added)
        if self.tail_cache is not None and other.tail_cache is not None:
            self.tail_cache.append_sequences(other.tail_cache)

    def reserve(self, capacity: int) -> None:
        for cache in self._all:
            cache.reserve(capacity)

    @property
    def buffers(self) -> list[KVBuffer]:
        """All buffers of verified tokens except the cache of the target's last layers."""
        tokens = [] if self.tokens is None else [self.tokens]
        return [*self.layers, self.kept, *tokens]

    @property
    def _all(self) -> list[KVBuffer | SlotCache]:
        return [*self.buffers, *([] if self.tail_cache is None else [self.tail_cache])]

    def _inputs(self, positions: Tensor) -> TrunkInputs:
        """Return the trunk's inputs at verified positions, apart from the tokens themselves."""
        previous = earlier = None
        if self.model.trunk.feature_input is not None:
            previous = previous_features(self.kept, positions)
        if self.tokens is not None:
            earlier = earlier_embeddings(self.tokens, positions, self.model.num_earlier)
        return TrunkInputs(previous, earlier=earlier)

    def _run_layers(
        self, embeddings: Tensor, positions: Tensor, highest: int, inputs: TrunkInputs
    ) -> None:
        """Add keys and values of all layers, each of which attends to verified tokens.

        If no token attends to the first one, the first one attends to itself, as in training: its
        result, which nothing reads, is then finite.
        """
        stores = self.write_through(positions, highest)
        slots = torch.arange(self.num_visible(highest), device=positions.device)
        mask = slots <= positions[:, :, None]
        if not self.model.attends_first:
            mask &= (slots > 0) | (slots == positions[:, :, None])
        trunk = self.model.trunk
        trunk.store_tokens(embeddings, positions, mask.unsqueeze(1), inputs, stores)
