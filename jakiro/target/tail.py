"""The target's last layers, run by themselves for target layer inference (arXiv 2410.03804)."""

from copy import copy
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from jakiro.errors import TargetNotSupported
from jakiro.target.adapter import TargetAdapter
from jakiro.target.cache import SlotCache, write_kv

TailKV = tuple[Float[Tensor, "batch heads tokens dim"], ...]  # layer by layer: keys, then values


class TargetTail:
    """The last layers and final norm of a frozen target, run on predicted input states.

    The caller keeps their keys and values: those of the target for verified tokens, and those
    computed from predicted states for drafted tokens.

    Args:
        target: adapter of the target; the layers share its weights.
        num_layers: number of layers.

    Raises:
        TargetNotSupported: the layers do not reproduce the target's features from its hidden
            states.
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
        """Return an empty cache of these layers.

        Args:
            batch: number of sequences.
            capacity: number of slots per sequence.
        """
        return SlotCache(
            self.shapes,
            batch,
            capacity,
            self.target.dtype,
            self.target.device,
            first_layer=self.input_state,
        )

    def kv(self, cache: SlotCache, slots: Int[Tensor, "batch tokens"]) -> TailKV:
        """Return the target's own keys and values of these layers for some tokens.

        Args:
            cache: cache of the whole target.
            slots: slots of the tokens.
        """
        layers = cache.slot_layers[self.input_state :]
        return tuple(
            part.gather(2, slots[:, None, :, None].expand(-1, part.shape[1], -1, part.shape[3]))
            for layer in layers
            for part in (layer.keys, layer.values)
        )

    def store(self, cache: SlotCache, kv: TailKV, slots: Int[Tensor, "batch tokens"]) -> None:
        """Store keys and values of some tokens.

        Args:
            cache: cache from `new_cache`.
            kv: keys and values to store.
            slots: slots of the tokens.
        """
        buffers = [part for layer in cache.slot_layers for part in (layer.keys, layer.values)]
        for buffer, new in zip(buffers, kv, strict=True):
            write_kv(buffer, new.to(buffer.dtype), slots)

    def forward(
        self,
        states: Float[Tensor, "batch queries hidden"],
        positions: Int[Tensor, "batch queries"],
        visible: Bool[Tensor, "batch queries slots"],
        seen_positions: Int[Tensor, "batch slots"],
        cache: Cache,
    ) -> Float[Tensor, "batch queries hidden"]:
        """Return the features that these layers compute from states at the input of the first.

        Args:
            states: hidden states of the queries, as input of the first layer.
            positions: absolute positions of the queries.
            visible: True where a query may see an entry of the cache.
            seen_positions: absolute position of the token in each entry of the cache.
            cache: cache for the queries' keys and values, with the slots already set.
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
        if self.target.device.type == "meta":  # tensors have only shapes
            return
        token_ids = torch.arange(4, device=self.target.device)[None]
        output = self.target.model(input_ids=token_ids, output_hidden_states=True, use_cache=False)
        states = output.hidden_states
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
    """Cache that starts with given keys and values; forwards append theirs, with gradients.

    Args:
        kv: keys and values of each layer.
        first_layer: index, in the model that reads the cache, of the first layer in `kv`.
    """

    def __init__(self, kv: TailKV, first_layer: int) -> None:
        layers = [_JoinedLayer(*pair) for pair in zip(kv[::2], kv[1::2], strict=True)]
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
        """Append keys and values and return all of them; nothing is overwritten."""
        self.keys = torch.cat((self.keys.to(key_states.dtype), key_states), dim=2)
        self.values = torch.cat((self.values.to(value_states.dtype), value_states), dim=2)
        return self.keys, self.values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the first keys and values are given."""

    def get_seq_length(self) -> int:
        """Return 0: each forward gets positions as an argument."""
        return 0

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (number of keys, offset), for models that size a mask by the cache."""
        return self.keys.shape[2] + query_length, 0


def _last_layers(target: TargetAdapter, num_layers: int) -> Any:
    """Return a copy of the target's decoder with only its last layers, sharing the weights."""
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
        expected="a decoder whose last layers and norm compute its features from a hidden state",
        got=f"{type(target.model).__name__}: {got}",
        remedy="set drafter.tail_layers to 0",
    )
