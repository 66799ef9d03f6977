"""Target states on disk, read sequence by sequence, and the `TargetView` of a batch made from them.

A part is one kind of state at every position of a sequence: `features`, `hidden.3` (hidden states
at the input of layer 3), or `layer.5` (the keys of layer 5, followed by its values). A drafter
needs some of these parts, which are identified by these names. For drafters with a draft
vocabulary, shards also contain the normalizers of the target's distributions.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import pad

from jakiro.config import JakiroConfig, state_sources
from jakiro.errors import CheckpointError
from jakiro.target.adapter import TargetSpec
from jakiro.target.attention_shape import HeadShape
from jakiro.target.cache import SlotCache, StateSource, StateSources, TargetState
from jakiro.target.step import StepOutput
from jakiro.target.tail import TailKV, TargetTail
from jakiro.utils.logs import get_logger
from jakiro.utils.pretrained import TORCH_DTYPES
from training.loss.batch import Normalizers, TargetView
from training.setup.preparation import RunInputs
from training.target_states.index import (
    NORMALIZERS,
    TargetStateIndex,
    fingerprint_of,
    is_whole,
    read_index,
    shard_path,
)

_logger = get_logger(__name__)

FEATURES = "features"

Parts = Mapping[str, Float[Tensor, "batch length width"]]

_OPEN_SHARDS = 256  # largest number of shards that are mapped at a time


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

    def take_from(self, output: StepOutput) -> dict[str, Tensor]:
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
    """Return the same view of a batch as `look_at_target`, but from stored parts."""
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


class TargetStateStore:
    """Target states of all sequences of a run, read on demand."""

    def __init__(self, folder: Path, index: TargetStateIndex, names: Sequence[str]) -> None:
        self._folder = folder
        self._index = index
        self._names = names
        self._opened = lru_cache(maxsize=_OPEN_SHARDS)(self._open)

    @property
    def dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self._index.fingerprint.dtype]

    def read(self, numbers: Iterable[int]) -> dict[str, Tensor]:
        return self._read(self._names, numbers)

    def normalizers(self, numbers: Iterable[int]) -> Normalizers | None:
        """Return the normalizers of the target's distributions; None if they are not stored."""
        if not self._index.has_normalizers:
            return None
        stored = self._read(tuple(NORMALIZERS), numbers)
        return Normalizers(stored["log_sum"], stored["best"].long())

    def _read(self, names: Sequence[str], numbers: Iterable[int]) -> dict[str, Tensor]:
        places = [divmod(number, self._index.sequences_per_shard) for number in numbers]
        slices = [(self._opened(shard), index) for shard, index in places]
        return {name: torch.stack([of[name][index] for of, index in slices]) for name in names}

    def _open(self, number: int) -> dict[str, Any]:
        file = safe_open(shard_path(self._folder, number), framework="pt")
        stored = (*self._names, *(NORMALIZERS if self._index.has_normalizers else ()))
        return {name: file.get_slice(name) for name in stored}


def open_target_states(inputs: RunInputs) -> TargetStateStore | None:
    """Return the target states that a run reads, or None if the target runs during training.

    If the source is "available", and the folder lacks states that the drafter reads, the target
    runs. The sizes of all shards are checked.
    """
    settings = inputs.settings.target_states
    if settings.source == "online" or settings.folder is None:
        return None
    folder = settings.folder.expanduser().absolute()
    index = read_index(folder)
    if index is None:
        raise _unusable(folder, "there is no index")
    wanted = index.model_copy(update={"fingerprint": fingerprint_of(inputs)})
    if (difference := index.difference(wanted)) is not None:
        name, got, expected = difference
        raise CheckpointError(
            f"the target states in {folder} do not belong to this run ({name} differs)",
            expected=expected,
            got=got,
            remedy="set target_states.folder to a folder with states of this target and data, or "
            "write these states with `jakiro prepare states`",
        )
    needed = list(States.needed_by(inputs.drafter_config).widths(inputs.target.spec))
    if missing := [name for name in needed if name not in index.widths]:
        if settings.source == "available":
            _logger.info(f"the target runs, because {folder} lacks {', '.join(missing)}")
            return None
        raise CheckpointError(
            f"the target states in {folder} lack states that this drafter reads",
            expected=", ".join(needed),
            got=", ".join(index.widths),
            remedy="write target states with this drafter's settings",
        )
    for path in (shard_path(folder, number) for number in range(index.num_shards)):
        if not is_whole(path):
            raise _unusable(folder, f"{path.name} is missing or does not have its full size")
    return TargetStateStore(folder, index, needed)


def _unusable(folder: Path, got: str) -> CheckpointError:
    return CheckpointError(
        f"the target states in {folder} are incomplete or damaged",
        got=got,
        remedy="run `jakiro prepare states` with this configuration and folder",
    )
