"""The target's key/value cache: preallocated slots that hold a tree and are pruned in place."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, CacheLayerMixin

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


def write_kv(
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


def selected(buffer: Tensor, places: Sequence[int], dim: int) -> Tensor:
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


class HeadShape(NamedTuple):
    """Geometry of one layer's keys and values; sizes may differ between the two."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


class StateSource(NamedTuple):
    """What of the target's state a drafter's memory is made of.

    Attributes:
        kind: keys and values as cached, or hidden states.
        layers: which; hidden state 0 is the embedding, k comes out of layer k, and the last is the
            feature behind the final norm.
    """

    kind: Literal["kv", "hidden"]
    layers: tuple[int, ...]

    @property
    def hidden_states(self) -> tuple[int, ...]:
        """The hidden states that a cache must keep for it."""
        return self.layers if self.kind == "hidden" else ()


class SlotLayer(CacheLayerMixin):
    """One layer's view of a `SlotCache`: writes go to given slots, reads see a prefix of slots.

    Committed tokens live at the slot equal to their position. Masks decide what is visible, so
    there is no counter, nothing grows, and nothing is dropped when a window slides.
    """

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True
        self.slots: Tensor | None = None
        self.num_visible = 0

    def set_slots(self, slots: Tensor, num_visible: int) -> None:
        """Send the next update to `slots` [batch, queries]; it will return `num_visible` slots."""
        self.slots, self.num_visible = slots, num_visible

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Scatter new keys and values [batch, heads, queries, dim]; return the visible prefix."""
        assert self.slots is not None
        write_kv(self.keys, key_states, self.slots)
        write_kv(self.values, value_states, self.slots)
        return self.keys[:, :, : self.num_visible], self.values[:, :, : self.num_visible]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: storage exists from the start."""

    def get_seq_length(self) -> int:
        """Return 0: lengths are kept per row by the engine, not per layer."""
        return 0

    def get_max_length(self) -> int:
        """Return the number of slots."""
        return int(self.keys.shape[2])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (visible slots, offset), for models that size a mask by the cache."""
        return self.num_visible, 0


class SlotCache(Cache):
    """All layers' slots, in one block of memory per head shape, and perhaps hidden states beside.

    Args:
        shapes: head shape of each layer.
        batch: number of sequences.
        capacity: slots per sequence; rounded up to whole buckets.
        dtype: of keys and values.
        device: where they live.
        hidden_states: which hidden states are kept, too.
        hidden_size: of a hidden state.
        first_layer: index of the first of these layers in the model that reads the cache.
    """

    def __init__(
        self,
        shapes: tuple[HeadShape, ...],
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        hidden_states: tuple[int, ...] = (),
        hidden_size: int = 0,
        first_layer: int = 0,
    ) -> None:
        self.capacity = bucketed(capacity)
        self.hidden_states = hidden_states
        self._members: list[list[int]] = []  # layers of each pair of blocks
        self._blocks: list[Tensor] = []
        for shape in dict.fromkeys(shapes):
            members = [index for index, other in enumerate(shapes) if other == shape]
            self._members.append(members)
            self._blocks += [
                torch.zeros(
                    (len(members), batch, shape.num_kv_heads, self.capacity, dim),
                    dtype=dtype,
                    device=device,
                )
                for dim in (shape.key_dim, shape.value_dim)
            ]
        hidden_shape = (len(hidden_states), batch, 1, self.capacity, hidden_size)
        self._hidden = torch.zeros(hidden_shape, dtype=dtype, device=device)
        views = self._views()
        self.slot_layers = [SlotLayer(*views[index]) for index in range(len(shapes))]
        absent = self.slot_layers[:1] * first_layer  # are never written
        super().__init__(layers=[*absent, *self.slot_layers])

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one cached token takes over all layers."""
        total = sum(block.numel() * block.element_size() for block in self._all_blocks)
        return total // (self._blocks[0].shape[1] * self.capacity)

    def select_sequences(self, places: Sequence[int]) -> None:
        """Drop all sequences but those at these places, which are ascending."""
        self._replace([selected(block, places, dim=1) for block in self._all_blocks])

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` slots, keeping what is there."""
        if capacity > self.capacity:
            self.capacity = bucketed(capacity)
            self._replace([grown(block, self.capacity) for block in self._all_blocks])

    def set_slots(self, slots: Int[Tensor, "batch queries"], num_visible: int) -> None:
        """Prepare every layer for a forward that writes `slots` and reads `num_visible` slots."""
        for layer in self.slot_layers:
            layer.set_slots(slots, num_visible)

    def visible_for(self, highest_slot: int) -> int:
        """Return the bucketed number of slots that covers `highest_slot`."""
        return min(bucketed(highest_slot + 1), self.capacity)

    def _views(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Return each layer's keys and values."""
        pairs = zip(self._members, self._blocks[::2], self._blocks[1::2], strict=True)
        return {
            index: (in_place(keys[place]), in_place(values[place]))
            for members, keys, values in pairs
            for place, index in enumerate(members)
        }

    @property
    def _all_blocks(self) -> list[Tensor]:
        return [*self._blocks, self._hidden]

    def _replace(self, blocks: list[Tensor]) -> None:
        *self._blocks, self._hidden = blocks
        for index, (keys, values) in self._views().items():
            self.slot_layers[index].keys, self.slot_layers[index].values = keys, values

    def move(
        self, source: Int[Tensor, "batch rows"], destination: Int[Tensor, "batch rows"]
    ) -> None:
        """Copy rows between slots in all layers; costs O(rows), independent of the context."""
        for block in self._all_blocks:
            shape = (block.shape[0], -1, block.shape[2], -1, block.shape[4])
            taken = block.gather(3, source[None, :, None, :, None].expand(shape))
            block.scatter_(3, destination[None, :, None, :, None].expand(shape), taken)

    def store_hidden(
        self,
        hidden: Sequence[Float[Tensor, "batch queries hidden"]],
        slots: Int[Tensor, "batch queries"],
    ) -> None:
        """Store the kept hidden states of the tokens at `slots`."""
        for block, states in zip(self._hidden, hidden, strict=True):
            write_kv(in_place(block), states.unsqueeze(1), slots)

    def state(
        self, slots: Int[Tensor, "batch rows"], source: StateSource
    ) -> Float[Tensor, "batch rows layers width"]:
        """Return what memory is made of, for the tokens at `slots`."""
        if source.kind == "kv":
            return self.kv(slots, source.layers)
        places = tuple(self.hidden_states.index(layer) for layer in source.layers)
        return _kv_of(self._hidden, slots, places)

    def kv(
        self, slots: Int[Tensor, "batch rows"], layers: tuple[int, ...]
    ) -> Float[Tensor, "batch rows layers width"]:
        """Return keys and values of `layers` at `slots`, flattened to one width per layer.

        Layers that are narrower than the widest one are filled up with zeros.
        """
        if len(self._blocks) == 2:
            gathered = [_kv_of(block, slots, layers) for block in self._blocks]
            return torch.cat(gathered, dim=-1)
        parts = []
        for index in layers:
            layer = self.slot_layers[index]
            pair = [_kv_of(part[None], slots, (0,)) for part in (layer.keys, layer.values)]
            parts.append(torch.cat(pair, dim=-1))
        widest = max(part.shape[-1] for part in parts)
        return torch.cat([pad(part, (0, widest - part.shape[-1])) for part in parts], dim=2)


def _kv_of(block: Tensor, slots: Tensor, layers: tuple[int, ...]) -> Tensor:
    """Gather [layer, batch, head, slot, dim] at slots into [batch, row, layer, head * dim]."""
    is_all = layers == tuple(range(block.shape[0]))
    chosen = block if is_all else block[list(layers)]
    shape = (chosen.shape[0], -1, chosen.shape[2], -1, chosen.shape[4])
    taken = chosen.gather(3, slots[None, :, None, :, None].expand(shape))
    return taken.permute(1, 3, 0, 2, 4).flatten(start_dim=3)


class TargetState(NamedTuple):
    """Raw state of some tokens, layer by layer; None where a drafter reads none."""

    memory: Float[Tensor, "batch tokens layers width"] | None
    features: Float[Tensor, "batch tokens states hidden"] | None

    def to(self, dtype: torch.dtype) -> "TargetState":
        """Return the state in another dtype."""
        return TargetState(*(None if part is None else part.to(dtype) for part in self))


class StateSources(NamedTuple):
    """What memory is made of, and what the features that a drafter reads are made of."""

    memory: StateSource | None
    features: StateSource | None

    @property
    def hidden_states(self) -> tuple[int, ...]:
        """The hidden states that a cache must keep, ascending."""
        several = [source.hidden_states for source in self if source is not None]
        return tuple(sorted({state for states in several for state in states}))

    def read(self, cache: SlotCache, slots: Int[Tensor, "batch rows"]) -> TargetState:
        """Return the state of the tokens at some slots of a cache that keeps `hidden_states`."""
        return TargetState(*(None if one is None else cache.state(slots, one) for one in self))
