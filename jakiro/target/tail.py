"""The target's last layers and their caches, for target layer inference (arXiv 2410.03804)."""

from copy import copy
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache

from jakiro.errors import TargetNotSupported
from jakiro.target.adapter import TargetAdapter
from jakiro.target.cache import PlacedLayer, SlotCache, write_kv
from jakiro.target.checks import cache_argument

TailKV = tuple[Float[Tensor, "batch heads tokens dim"], ...]  # layer by layer: keys, then values


class TargetTail:
    """The last layers and final norm of a frozen target, run on predicted input states.

    The caller stores the layers' keys and values: the target's own for verified tokens, and those
    computed from predicted states for drafted tokens.
    """

    def __init__(self, target: TargetAdapter, num_layers: int) -> None:
        target.need_trees("tail_layers")
        self.target = target
        self.num_layers = num_layers
        self.shapes = target.spec.head_shapes[-num_layers:]
        self.input_state = target.spec.num_layers - num_layers  # index among the hidden states
        self._decoder = _last_layers(target, num_layers)
        self._cache_argument = cache_argument(self._decoder)
        self._masks = target.masks_of(target.spec.layer_kinds[-num_layers:])
        self._check()

    def new_cache(self, batch: int, capacity: int) -> SlotCache:
        kind = (self.target.dtype, self.target.device)
        return SlotCache(self.shapes, batch, capacity, *kind, first_layer=self.input_state)

    def kv(self, cache: SlotCache, slots: Int[Tensor, "batch tokens"]) -> TailKV:
        layers = cache.slot_layers[self.input_state :]
        return tuple(
            part.gather(2, slots[:, None, :, None].expand(-1, part.shape[1], -1, part.shape[3]))
            for layer in layers
            for part in (layer.keys, layer.values)
        )

    def store(self, cache: SlotCache, kv: TailKV, slots: Int[Tensor, "batch tokens"]) -> None:
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
        """Return the features that the tail layers compute from the given hidden states."""
        output = self._decoder(
            inputs_embeds=states.to(self.target.dtype),
            position_ids=positions,
            attention_mask=self._masks(visible, positions, seen_positions),
            use_cache=True,
            **{self._cache_argument: cache},
        )
        features: Tensor = output.last_hidden_state
        return features.to(states.dtype)

    @torch.no_grad()
    def _check(self) -> None:
        if self.target.device.type == "meta":  # tensors have shapes but no values
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
    """Cache that starts with given keys and values; each forward pass appends new ones.

    Gradients flow through all keys and values.

    Args:
        first_layer: index, in the model that reads the cache, of the first layer in `kv`.
    """

    def __init__(self, kv: TailKV, first_layer: int) -> None:
        layers = [_JoinedLayer(*pair) for pair in zip(kv[::2], kv[1::2], strict=True)]
        super().__init__(layers=[*layers[:1] * first_layer, *layers])


class _JoinedLayer(PlacedLayer):
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.keys = torch.cat((self.keys.to(key_states.dtype), key_states), dim=2)
        self.values = torch.cat((self.values.to(value_states.dtype), value_states), dim=2)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2] + query_length, 0


def _last_layers(target: TargetAdapter, num_layers: int) -> Any:
    """Return a copy of the target's decoder that has only the last layers and shares weights."""
    layers: Any = getattr(target.decoder, "layers", None)
    spec = target.spec
    whole = isinstance(layers, nn.ModuleList) and len(layers) == spec.num_layers
    if not whole or spec.num_hidden_states != spec.num_layers + 1:
        raise _unsupported(target, "layers that cannot be separated")
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
        "the target's last layers cannot be run separately from its other layers",
        expected="a decoder whose last layers and norm compute its features from a hidden state",
        got=f"{type(target.model).__name__}: {got}",
        remedy="set drafter.tail_layers to 0",
    )
