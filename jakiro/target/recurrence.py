"""States of recurrent layers, which cannot be cut back to a prefix as keys and values can.

Each sequence has a *boundary*: the number of tokens that its states have read. A forward pass reads
all tokens from the boundary on, most of them again, and leaves the states as they are.
`RecurrentStates.keep` then moves the boundary, if the states after the accepted tokens are known. A
convolution's state is its last inputs, which are known after every token that was read. Other
states are known only after the last token.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

# Largest number of tokens between a boundary and the root. If there are more, they are read once
# without drafts, so that they need not be read again in every step.
MOST_REPLAYED = 16


class StateShape(NamedTuple):
    """A state of a recurrent layer.

    Attributes:
        layer: index of the layer in the target.
        number: index of the state among those of the same kind in the layer.
        is_convolution: whether the state consists of the last inputs of a convolution.
        size: size for one sequence; the last dimension of a convolution's state are the inputs.
    """

    layer: int
    number: int
    is_convolution: bool
    size: tuple[int, ...]
    dtype: torch.dtype


class Layout(NamedTuple):
    """What the layers of a target with recurrent layers store.

    Attributes:
        attention_layers: indices of the layers with keys and values, which may have states, too.
    """

    num_layers: int
    attention_layers: tuple[int, ...]
    states: tuple[StateShape, ...]

    @property
    def replays(self) -> bool:
        """Whether some states are known only after the last token that was read."""
        return not all(shape.is_convolution for shape in self.states)

    @classmethod
    def of(cls, layers: Sequence[Any]) -> "Layout":
        """Return the layout of the layers of a cache of transformers that has been used."""
        found = [
            StateShape(layer_index, number, is_convolution, tuple(state.shape[1:]), state.dtype)
            for layer_index, layer in enumerate(layers)
            if isinstance(layer, LinearAttentionCacheLayerMixin)
            for is_convolution, states in (
                (True, layer.conv_states),
                (False, layer.recurrent_states),
            )
            for number, state in states.items()
            if state is not None
        ]
        with_keys = (getattr(layer, "keys", None) is not None for layer in layers)
        attention = tuple(number for number, has_keys in enumerate(with_keys) if has_keys)
        return cls(len(layers), attention, tuple(found))


class StateLayer(LinearAttentionLayer):
    """States of a layer in a forward pass: first those from which it starts, then the new ones.

    A convolution's new state is the former one, followed by all inputs, if it records the past.
    """

    def __init__(self, shapes: Sequence[StateShape]) -> None:
        LinearAttentionLayer.__init__(self, 1 + max(shape.number for shape in shapes))
        for shape in shapes:
            self.has_previous_state[shape.number] = True
            if shape.is_convolution:
                self.is_conv_states_initialized[shape.number] = True
                self.conv_kernel_size[shape.number] = shape.size[-1]
            else:
                self.is_recurrent_states_initialized[shape.number] = True

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Store a new state beside the one from which the forward pass started, not over it."""
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


class RecurrentStates:
    """The states of all recurrent layers at the boundaries of the sequences of a batch.

    Attributes:
        boundaries: number of tokens of each sequence that its states have read.
        kept: each state, with a row for each sequence.
    """

    def __init__(
        self, layers: Sequence[Any], layout: Layout, batch: int, device: torch.device
    ) -> None:
        self.boundaries = [0] * batch
        self._width = 0  # number of tokens that the last forward pass read of each sequence
        self._replays, self._shapes = layout.replays, layout.states
        self._held: list[dict[int, Tensor | None]] = [  # where layers read and write each state
            layers[shape.layer].conv_states
            if shape.is_convolution
            else layers[shape.layer].recurrent_states
            for shape in layout.states
        ]
        if not layout.replays:
            for shape in layout.states:
                layers[shape.layer].activate_past_recording()
        # A convolution starts as if zeros came before the text, as without a state.
        self.kept = [
            torch.zeros(batch, *shape.size, dtype=shape.dtype, device=device)
            for shape in layout.states
        ]

    @property
    def num_bytes(self) -> int:
        return sum(state.nbytes for state in self.kept)

    def start(self, rows: Int[Tensor, " rows"] | None, count: int) -> None:
        """Give the layers the states from which a forward pass over `count` tokens starts."""
        self._width = count
        for shape, held, kept in zip(self._shapes, self._held, self.kept, strict=True):
            state = kept if rows is None else kept[rows]
            # transformers overwrites a state for a single token, and one without recorded inputs.
            is_overwritten = count == 1 or (shape.is_convolution and self._replays)
            held[shape.number] = state.clone() if is_overwritten else state

    def keep(self, ends: Sequence[int], rows: Sequence[int] | None = None) -> None:
        """Move boundaries to the ends of accepted tokens after a forward pass, if states are known.

        Args:
            ends: number of accepted tokens of each sequence that was read, from its start.
            rows: indices of these sequences; None for all in order.
        """
        counts = [
            (place, row, end - self.boundaries[row])
            for place, (row, end) in enumerate(zip(rows or range(len(ends)), ends, strict=True))
        ]
        known = [part for part in counts if part[2] == self._width or not self._replays]
        for _, row, count in known:
            self.boundaries[row] += count
        for number, (shape, held) in enumerate(zip(self._shapes, self._held, strict=True)):
            new, held[shape.number] = held[shape.number], None
            assert new is not None
            for place, row, count in known:
                state = new[place]
                if not self._replays:
                    state = state[..., count : count + shape.size[-1]]
                elif len(self.boundaries) == 1:
                    self.kept[number] = new
                    continue
                self.kept[number][row] = state

    def rollback(self, length: int) -> int:
        """Return the position, at most `length`, from which the only sequence must be read.

        This is its boundary, or 0 if the boundary is later.
        """
        (boundary,) = self.boundaries
        if boundary <= length:
            return boundary
        self.boundaries = [0]
        self.kept = [torch.zeros_like(state) for state in self.kept]
        return 0

    def select_sequences(self, indices: Sequence[int]) -> None:
        self.boundaries = [self.boundaries[index] for index in indices]
        self.kept = [state[list(indices)] for state in self.kept]

    def append_sequences(self, other: "RecurrentStates") -> None:
        self.boundaries += other.boundaries
        pairs = zip(self.kept, other.kept, strict=True)
        self.kept = [torch.cat(pair) for pair in pairs]
