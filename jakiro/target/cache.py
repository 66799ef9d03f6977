"""The target's key/value cache of preallocated slots, and the target states read from it."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer

from jakiro.target.attention_shape import HeadShape
from jakiro.target.recurrence import Layout, RecurrentStates, StateLayer, StateShape
from jakiro.target.sequence_storage import SequenceStorage, SequenceStorages, bucketed


def in_place(buffer: Tensor) -> Tensor:
    """Return the buffer, marked as having a fixed address, so that compiled code can write to it.

    Without this mark, a CUDA graph would copy the buffer, or no CUDA graph would be used.
    """
    if buffer.is_cuda:
        torch._dynamo.mark_static_address(buffer, guard=False)
    return buffer


def write_kv(
    buffer: Float[Tensor, "batch heads slots dim"],
    kv: Float[Tensor, "rows heads tokens dim"],
    slots: Int[Tensor, "rows tokens"],
    rows: Int[Tensor, " rows"] | None = None,
    start: int | None = None,
) -> None:
    """Store keys or values of sequences at the given slots, in place.

    Args:
        start: first slot, if the slots of all sequences are the same and follow each other.
    """
    if not torch.compiler.is_compiling() and start is not None:
        buffer.narrow(2, start, kv.shape[2]).copy_(kv)
        return
    if rows is None and buffer.is_cuda and not torch.compiler.is_compiling():
        buffer.scatter_(2, slots[:, None, :, None].expand_as(kv), kv)
        return
    # `scatter_` is up to 200 times slower in bf16 on a CPU and, if compiled, copies the buffer.
    if rows is None:
        rows = torch.arange(len(buffer), device=buffer.device)
    buffer[rows[:, None], :, slots] = kv.transpose(1, 2)


class StateSource(NamedTuple):
    """Target states that the drafter's memory or features are made from.

    Attributes:
        layers: indices of the layers or hidden states. Hidden state 0 is the embedding, hidden
            state k is the output of layer k, and the last one is the feature after the final norm.
    """

    kind: Literal["kv", "hidden"]
    layers: tuple[int, ...]

    @property
    def hidden_states(self) -> tuple[int, ...]:
        """The indices of the hidden states that a cache must hold for this source."""
        return self.layers if self.kind == "hidden" else ()


class PlacedLayer(CacheLayerMixin):
    """One layer of a cache whose tokens have the positions that each forward pass is given."""

    is_sliding = False
    keys: Float[Tensor, "batch heads slots dim"]
    values: Float[Tensor, "batch heads slots value_dim"]

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing, because keys and values are given at construction."""

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class SlotLayer(PlacedLayer):
    """One layer of a `SlotCache`: each update writes to given slots and returns the first slots.

    The slot of a committed token equals its position. Masks determine which slots a query attends
    to. The layer therefore does not count tokens, grow, or drop tokens outside a sliding window.

    Attributes:
        slots: slots of the next update [rows, queries].
        num_visible: number of slots, starting from slot 0, that the update returns.
        rows: see `StepInput`.
        views: keys and values to write, then those that are visible, if these slots follow each
            other in all sequences.
    """

    slots: Tensor
    num_visible = 0
    rows: Tensor | None = None
    views: tuple[Tensor, ...] = ()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        # A compiled step would keep the addresses of the views with which it was compiled.
        if not torch.compiler.is_compiling() and self.views:
            new_keys, new_values, keys, values = self.views
            new_keys.copy_(key_states)
            new_values.copy_(value_states)
            return keys, values
        write_kv(self.keys, key_states, self.slots, self.rows)
        write_kv(self.values, value_states, self.slots, self.rows)
        return self._visible(self.keys), self._visible(self.values)

    def _visible(self, buffer: Tensor) -> Tensor:
        visible = buffer[:, :, : self.num_visible]
        return visible if self.rows is None else visible[self.rows]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (visible slots, offset), for models that derive a mask's size from the cache."""
        return self.num_visible, 0


class StateSlotLayer(StateLayer, SlotLayer):  # type: ignore[override]
    def __init__(self, shapes: Sequence[StateShape], keys: Tensor, values: Tensor) -> None:
        SlotLayer.__init__(self, keys, values)
        StateLayer.__init__(self, shapes)


class SlotCache(SequenceStorages, Cache):
    """Key/value slots of all layers and, if requested, cached hidden states.

    Layers of the same head shape share one block of memory for keys and one for values.

    Args:
        capacity: number of slots per sequence; rounded up to a multiple of `BUCKET`.
        first_layer: index, in the model that reads the cache, of the first layer in `shapes`.
        layout: layers of a target with recurrent layers; None if all layers are in `shapes`.

    Attributes:
        states: the states of recurrent layers; None without such layers.
    """

    states: RecurrentStates | None = None

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
        layout: Layout | None = None,
    ) -> None:
        slots = bucketed(capacity)
        self.hidden_states = hidden_states
        self._members: list[list[int]] = []  # layer indices of each pair of blocks
        sizes: list[tuple[int, ...]] = []  # of keys and values of each group, then hidden states
        for shape in dict.fromkeys(shapes):
            members = [index for index, other in enumerate(shapes) if other == shape]
            self._members.append(members)
            for dim in (shape.key_dim, shape.value_dim):
                sizes.append((len(members), batch, shape.num_kv_heads, slots, dim))
        sizes.append((len(hidden_states), batch, 1, slots, hidden_size))
        blocks = (torch.zeros(size, dtype=dtype, device=device) for size in sizes)
        self._storages = [SequenceStorage(block, dim=1) for block in blocks]
        views = self._views()
        self.slot_layers = [SlotLayer(*views[index]) for index in range(len(shapes))]
        self._hidden_views = self._marked_hidden()
        absent = self.slot_layers[:1] * first_layer  # placeholders that are never written to
        layers: list[Any] = [*absent, *self.slot_layers]
        if layout is not None:
            layers = self._arranged(layout, views)
            self.states = RecurrentStates(layers, layout, batch, device)
        super().__init__(layers=layers)

    def _arranged(self, layout: Layout, views: dict[int, tuple[Tensor, Tensor]]) -> list[Any]:
        """Return the layers of a target with recurrent layers."""
        layers: list[Any] = []
        for index in range(layout.num_layers):
            shapes = [shape for shape in layout.states if shape.layer == index]
            layer: Any = StateLayer(shapes) if shapes else DummyLayer()
            if index in layout.attention_layers:
                number = layout.attention_layers.index(index)
                if shapes:
                    self.slot_layers[number] = StateSlotLayer(shapes, *views[number])
                layer = self.slot_layers[number]
            layers.append(layer)
        return layers

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        layer: Any = self.layers[layer_idx]
        keys, values = layer.update(key_states, value_states)
        return keys, values

    @property
    def bytes_per_token(self) -> int:
        blocks = self._all_blocks
        total = sum(block.nbytes for block in blocks)
        return total // (blocks[0].shape[1] * self.capacity)

    @property
    def num_rows(self) -> int:
        """The number of sequences for which there is room without further memory."""
        return self._storages[0].num_rows

    def set_slots(
        self,
        slots: Int[Tensor, "rows queries"],
        num_visible: int,
        rows: Int[Tensor, " rows"] | None = None,
        start: int | None = None,
    ) -> None:
        """Prepare every layer for a forward pass."""
        views: dict[int, tuple[Tensor, ...]] = {}
        can_slice = slots.device.type == "cpu" and not torch.is_grad_enabled()
        if start is not None and can_slice and (rows is None or len(rows) == 1):
            row = None if rows is None else int(rows)
            views = self._views_of_run(row, start, slots.shape[1], num_visible)
        for index, layer in enumerate(self.slot_layers):
            layer.slots, layer.num_visible, layer.rows = slots, num_visible, rows
            layer.views = views.get(index, ())
        if self.states is not None:
            self.states.start(rows, slots.shape[1])

    def select_sequences(
        self, indices: Sequence[int], num_used: Sequence[int] | None = None
    ) -> None:
        super().select_sequences(indices, num_used)
        if self.states is not None:
            self.states.select_sequences(indices)

    def append_sequences(self, other: SequenceStorages) -> None:
        super().append_sequences(other)
        if self.states is not None:
            assert isinstance(other, SlotCache)
            assert other.states is not None
            self.states.append_sequences(other.states)

    def visible_for(self, highest_slot: int) -> int:
        """Return the number of slots, in whole buckets, that includes `highest_slot`."""
        return min(bucketed(highest_slot + 1), self.capacity)

    def _views(self) -> dict[int, tuple[Tensor, Tensor]]:
        pairs = zip(self._members, self._blocks[::2], self._blocks[1::2], strict=True)
        return {
            layer: (in_place(keys[index]), in_place(values[index]))
            for members, keys, values in pairs
            for index, layer in enumerate(members)
        }

    def _views_of_run(
        self, row: int | None, start: int, count: int, num_visible: int
    ) -> dict[int, tuple[Tensor, ...]]:
        """Return each layer's keys and values of consecutive slots, and of all visible ones."""
        views: dict[int, tuple[Tensor, ...]] = {}
        pairs = zip(self._members, self._blocks[::2], self._blocks[1::2], strict=True)
        for members, keys, values in pairs:
            both = [block if row is None else block[:, row : row + 1] for block in (keys, values)]
            parts = [block.narrow(3, start, count).unbind() for block in both]
            parts += [block.narrow(3, 0, num_visible).unbind() for block in both]
            views |= dict(zip(members, zip(*parts, strict=True), strict=True))
        return views

    @property
    def _all_blocks(self) -> list[Tensor]:
        return [storage.live for storage in self._storages]

    @property
    def _blocks(self) -> list[Tensor]:
        """The keys and values of each group of layers, for the present sequences."""
        return self._all_blocks[:-1]

    @property
    def _hidden(self) -> Tensor:
        return self._storages[-1].live

    def _marked_hidden(self) -> list[Tensor]:
        """Return the block of each hidden state, for compiled code, which must not set marks."""
        return [in_place(block) for block in self._hidden]

    def _update(self) -> None:
        self._hidden_views = self._marked_hidden()
        for index, (keys, values) in self._views().items():
            layer = self.slot_layers[index]
            layer.keys, layer.values, layer.views = keys, values, ()

    def move(
        self, source: Int[Tensor, "batch tokens"], destination: Int[Tensor, "batch tokens"]
    ) -> None:
        """Copy tokens between slots in all layers, at a cost independent of the context length."""
        sequence = torch.arange(len(source), device=source.device)[:, None]
        for block in self._all_blocks:
            block[:, sequence, :, destination] = block[:, sequence, :, source]

    def store_hidden(
        self,
        hidden: Sequence[Float[Tensor, "rows queries hidden"]],
        slots: Int[Tensor, "rows queries"],
        rows: Int[Tensor, " rows"] | None = None,
    ) -> None:
        for block, states in zip(self._hidden_views, hidden, strict=True):
            write_kv(block, states.unsqueeze(1), slots, rows)

    def state(
        self, slots: Int[Tensor, "batch tokens"], source: StateSource
    ) -> Float[Tensor, "batch tokens layers width"]:
        if source.kind == "kv":
            return self.kv(slots, source.layers)
        indices = tuple(self.hidden_states.index(layer) for layer in source.layers)
        return _kv_of(self._hidden, slots, indices)

    def kv(
        self, slots: Int[Tensor, "batch tokens"], layers: tuple[int, ...]
    ) -> Float[Tensor, "batch tokens layers width"]:
        """Return keys and values, concatenated and flattened to one vector per token and layer.

        Vectors of layers that are narrower than the widest layer are padded with zeros.
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
    """Return the entries at `slots` of [layer, batch, head, slot, dim], ordered by token and layer.

    The result has the shape [batch, token, layer, head * dim].
    """
    if layers == tuple(range(block.shape[0])):
        shape = (block.shape[0], -1, block.shape[2], -1, block.shape[4])
        taken = block.gather(3, slots[None, :, None, :, None].expand(shape))
    else:  # without a copy of all slots of these layers
        index = slots[:, None, :, None].expand(-1, block.shape[2], -1, block.shape[4])
        taken = torch.stack([block[layer].gather(2, index) for layer in layers])
    return taken.permute(1, 3, 0, 2, 4).flatten(start_dim=3)


class TargetState(NamedTuple):
    """Raw target states of tokens that memory and features are made from; None if unused."""

    memory: Float[Tensor, "batch tokens layers width"] | None
    features: Float[Tensor, "batch tokens states hidden"] | None

    def to(self, dtype: torch.dtype) -> "TargetState":
        return TargetState(*(None if part is None else part.to(dtype) for part in self))


class StateSources(NamedTuple):
    """Target states that a drafter's memory and features are made from; None if unused."""

    memory: StateSource | None
    features: StateSource | None

    @property
    def hidden_states(self) -> tuple[int, ...]:
        """The indices of the hidden states that a cache must hold, in ascending order."""
        sources = [source for source in self if source is not None]
        return tuple(sorted({state for source in sources for state in source.hidden_states}))

    def read(self, cache: SlotCache, slots: Int[Tensor, "batch tokens"]) -> TargetState:
        parts = (None if source is None else cache.state(slots, source) for source in self)
        return TargetState(*parts)
