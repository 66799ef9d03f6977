"""The target's last layers by themselves, for target layer inference (arXiv 2410.03804)."""

from copy import copy
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from jakiro.errors import TargetNotSupported
from jakiro.target.adapter import TargetAdapter
from jakiro.target.cache import SlotCache, write_kv

TailKV = tuple[Float[Tensor, "batch heads rows dim"], ...]  # keys, values of each layer in turn


class TargetTail:
    """The last layers of a frozen target and its final norm, run on states that stand for inputs.

    They attend to rows of their own, which the caller keeps: the target's for verified tokens, and
    those of the states for tokens that are drafted.

    Args:
        target: whose layers these are; no weight is copied.
        num_layers: how many.

    Raises:
        TargetNotSupported: they do not reproduce the target's features from its hidden states.
    """

    def __init__(self, target: TargetAdapter, num_layers: int) -> None:
        self.target = target
        self.num_layers = num_layers
        self.shapes = target.spec.head_shapes[-num_layers:]
        self.input_state = target.spec.num_layers - num_layers  # index among the hidden states
        self._decoder = _last_layers(target, num_layers)
        self._masks = target.masks_of(target.spec.layer_kinds[-num_layers:])
        self._check()

    def new_cache(self, batch: int, capacity: int) -> SlotCache:
        """Return an empty cache of these layers for sequences of up to `capacity` tokens."""
        return SlotCache(
            self.shapes,
            batch,
            capacity,
            self.target.dtype,
            self.target.device,
            first_layer=self.input_state,
        )

    def kv(self, cache: SlotCache, slots: Int[Tensor, "batch rows"]) -> TailKV:
        """Return the target's own rows of these layers at some slots of its cache."""
        layers = cache.slot_layers[self.input_state :]
        return tuple(
            part.gather(2, slots[:, None, :, None].expand(-1, part.shape[1], -1, part.shape[3]))
            for layer in layers
            for part in (layer.keys, layer.values)
        )

    def store(self, cache: SlotCache, rows: TailKV, slots: Int[Tensor, "batch rows"]) -> None:
        """Store rows at slots of a cache from `new_cache`."""
        buffers = [part for layer in cache.slot_layers for part in (layer.keys, layer.values)]
        for buffer, new in zip(buffers, rows, strict=True):
            write_kv(buffer, new.to(buffer.dtype), slots)

    def forward(
        self,
        states: Float[Tensor, "batch queries hidden"],
        positions: Int[Tensor, "batch queries"],
        visible: Bool[Tensor, "batch queries slots"],
        seen_positions: Int[Tensor, "batch slots"],
        cache: Cache,
    ) -> Float[Tensor, "batch queries hidden"]:
        """Return the features that follow from states at the input of the first of these layers.

        Args:
            states: of the queries.
            positions: where they stand.
            visible: which rows each query may see, of those that the cache then shows.
            seen_positions: of the tokens of these rows.
            cache: takes the states' rows and shows all; it is aimed at the right slots.
        """
        output = self._decoder(
            inputs_embeds=states.to(self.target.dtype),
            position_ids=positions,
            attention_mask=self._masks(visible, positions, seen_positions),
            past_key_values=cache,
            use_cache=True,
        )
        features: Tensor = output.last_hidden_state
        return features.to(states.dtype)

    @torch.no_grad()
    def _check(self) -> None:
        if self.target.device.type == "meta":  # shapes without numbers
            return
        token_ids = torch.arange(4, device=self.target.device)[None]
        told = self.target.model(input_ids=token_ids, output_hidden_states=True, use_cache=False)
        states = told.hidden_states
        chain = torch.ones(1, 4, 4, dtype=torch.bool, device=token_ids.device).tril()
        cache = self.new_cache(1, 4)
        cache.set_slots(token_ids, num_visible=4)
        try:
            got = self.forward(states[self.input_state], token_ids, chain, token_ids, cache)
        except (AttributeError, TypeError, ValueError, RuntimeError, LookupError) as error:
            raise _unsupported(self.target, repr(error).splitlines()[0]) from error
        tolerance = 1e-3 if got.dtype == torch.float32 else 5e-2
        expected = states[-1].float()
        difference = (got.float() - expected).abs().max().item()
        if not difference <= tolerance * max(1.0, expected.abs().max().item()):
            raise _unsupported(self.target, f"features that differ by {difference:.1e}")


class JoinedCache(Cache):
    """Shows given rows before all those that forwards write; gradients pass through both.

    Args:
        rows: keys and values of each layer.
        first_layer: index of the first of these layers in the model that reads the cache.
    """

    def __init__(self, rows: TailKV, first_layer: int) -> None:
        layers = [_JoinedLayer(*pair) for pair in zip(rows[::2], rows[1::2], strict=True)]
        super().__init__(layers=[*layers[:1] * first_layer, *layers])


class _JoinedLayer(CacheLayerMixin):
    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add rows and return all of them; nothing is overwritten."""
        self.keys = torch.cat((self.keys.to(key_states.dtype), key_states), dim=2)
        self.values = torch.cat((self.values.to(value_states.dtype), value_states), dim=2)
        return self.keys, self.values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the rows are given."""

    def get_seq_length(self) -> int:
        """Return 0: positions are told with each forward."""
        return 0

    def get_max_length(self) -> int:
        """Return that there is no limit."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (rows that are shown, offset), for models that size a mask by the cache."""
        return self.keys.shape[2] + query_length, 0


def _last_layers(target: TargetAdapter, num_layers: int) -> Any:
    """Return the target's decoder as it would be with its last layers only, on the same weights."""
    layers: Any = getattr(target.decoder, "layers", None)
    spec = target.spec
    whole = isinstance(layers, nn.ModuleList) and len(layers) == spec.num_layers
    if not whole or spec.num_hidden_states != spec.num_layers + 1:
        raise _unsupported(target, "layers that cannot be taken apart")
    shortened = copy(target.decoder)
    shortened._modules = {**target.decoder._modules, "layers": layers[-num_layers:]}
    config: Any = copy(target.decoder.config)
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = list(config.layer_types)[-num_layers:]
    shortened.config = config
    return shortened


def _unsupported(target: TargetAdapter, got: str) -> TargetNotSupported:
    return TargetNotSupported(
        "the target's last layers cannot be run by themselves",
        expected="a decoder whose last layers and norm make its features of its hidden states",
        got=f"{type(target.model).__name__}: {got}",
        remedy="set drafter.tail_layers to 0",
    )
