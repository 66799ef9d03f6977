"""The target states in a shard (one file), and the `TargetView` of a batch made from them.

A part is one kind of state at every position of a sequence: `features`, `hidden.3` (hidden states
at the input of layer 3), or `layer.5` (the keys of layer 5, followed by its values). A drafter
needs some of these parts, which are identified by these names. For drafters with a draft
vocabulary, shards also contain the normalizers of the target's distributions.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from jakiro.config import JakiroConfig, state_sources
from jakiro.target.adapter import TargetSpec
from jakiro.target.attention_shape import HeadShape
from jakiro.target.cache import SlotCache, StateSource, StateSources, TargetState
from jakiro.target.step import StepOutput
from jakiro.target.tail import TailKV, TargetTail
from training.loss.views import TargetView

FEATURES = "features"

Parts = Mapping[str, Float[Tensor, "batch length width"]]


class States(NamedTuple):
    """Indices of the states that shards contain in addition to the features."""

    hidden: tuple[int, ...]
    layers: tuple[int, ...]

    @classmethod
    def needed_by(cls, config: JakiroConfig) -> "States":
        """Return the states that the training of a drafter needs if the target is not run."""
        record, num_tail = config.target_record, config.settings.tail_layers
        last = None if record.num_hidden_states is None else record.num_hidden_states - 1
        sources = state_sources(config.settings, record)
        hidden, layers = set(sources.hidden_states), set[int]()
        if sources.memory is not None and sources.memory.kind == "kv":
            layers |= set(sources.memory.layers)
        if num_tail:
            count = len(record.kv_widths)
            hidden.add(count - num_tail)
            layers |= set(range(count - num_tail, count))
        # The last hidden state is the feature, which is stored anyway.
        return cls(tuple(sorted(hidden - {last})), tuple(sorted(layers)))

    def widths(self, spec: TargetSpec) -> dict[str, int]:
        """Return the width of each part (the number of values per position), by name."""
        hidden = {f"hidden.{state}": spec.hidden_size for state in self.hidden}
        layers = {f"layer.{layer}": spec.kv_widths[layer] for layer in self.layers}
        return {FEATURES: spec.hidden_size} | hidden | layers

    def taken_from(self, output: StepOutput) -> dict[str, Tensor]:
        """Return the parts of a batch, by name, taken from the target's output for this batch."""
        cache, slots = output.cache, output.step.slots
        parts = {FEATURES: output.features}
        for state in self.hidden:
            parts[f"hidden.{state}"] = _only(cache, slots, StateSource("hidden", (state,)))
        for layer in self.layers:
            parts[f"layer.{layer}"] = _only(cache, slots, StateSource("kv", (layer,)))
        return parts


def needs_normalizers(config: JakiroConfig, head: nn.Module) -> bool:
    """Return whether the training of a drafter is faster with normalizers on disk.

    Without them, all logits of the target are computed for each batch, also for tokens that are
    never drafted. A head that is not a plain linear layer computes all logits in any case.
    """
    return type(head) is nn.Linear and config.settings.draft_vocab_size is not None


def view_of(
    parts: Parts,
    embeddings: Float[Tensor, "batch length hidden"],
    sources: StateSources,
    tail: TargetTail | None,
) -> TargetView:
    """Return the same view of a batch as `look_at_target`, but from stored parts.

    Args:
        parts: parts of the batch by name, at least those that the drafter needs.
    """
    states = (None if source is None else _state(parts, source) for source in sources)
    state = TargetState(*states)
    view = TargetView(parts[FEATURES], state, embeddings)
    if tail is None:
        return view
    kv = (
        part
        for number, shape in enumerate(tail.shapes, tail.input_state)
        for part in _heads(parts[f"layer.{number}"], shape)
    )
    return view._replace(tail_input=_hidden(parts, tail.input_state), tail_kv=tuple(kv))


def _only(cache: SlotCache, slots: Tensor, source: StateSource) -> Tensor:
    return cache.state(slots, source)[:, :, 0]


def _hidden(parts: Parts, state: int) -> Tensor:
    return parts.get(f"hidden.{state}", parts[FEATURES])


def _state(parts: Parts, source: StateSource) -> Tensor:
    """Return the stacked states of one source, padded with zeros to the largest width."""
    if source.kind == "hidden":
        return torch.stack([_hidden(parts, state) for state in source.layers], dim=2)
    layers = [parts[f"layer.{layer}"] for layer in source.layers]
    widest = max(layer.shape[-1] for layer in layers)
    return torch.stack([pad(layer, (0, widest - layer.shape[-1])) for layer in layers], dim=2)


def _heads(layer: Tensor, shape: HeadShape) -> TailKV:
    """Return a layer's keys and values, split into heads as in a cache."""
    count = shape.num_kv_heads
    pair = layer.split([count * shape.key_dim, count * shape.value_dim], dim=-1)
    return tuple(part.unflatten(-1, (count, -1)).transpose(1, 2) for part in pair)
