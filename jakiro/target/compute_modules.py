"""The modules that a target computes with: the model's own, or copies that share its tensors."""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import psutil
from torch import nn
from transformers import PreTrainedModel

from jakiro.errors import TargetNotSupported
from jakiro.target.attention import GROUPED
from jakiro.target.checks import CausalLM
from jakiro.target.fused_decoder import Trial, are_alike, fuse_decoder
from jakiro.target.independent_rows import (
    BATCH_INVARIANT,
    SMALL,
    DoubleLinear,
    obstacle_to_invariance,
    with_independent_rows,
)
from jakiro.target.weights import (
    MappedMemory,
    PackedLinear,
    can_pack,
    has_adapters,
    join_weights,
    packed_bytes,
    version_of,
    with_products,
)

MEMORY_SHARE = 0.5  # largest share of the available memory that copied weights may take


def sharing_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model that shares all tensors, linear layers and configs."""
    # Linear layers are shared, too: all copies then use the same reordered weights, and notice if
    # a weight is replaced.
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    shared: dict[int, Any] = {id(layer): layer for layer in layers}
    shared |= {id(tensor): tensor for tensor in model.parameters()}
    shared |= {id(tensor): tensor for tensor in model.buffers()}
    configs = (getattr(module, "config", None) for module in model.modules())
    shared |= {id(config): config for config in configs if config is not None}
    return copy.deepcopy(model, shared)


def with_attention(module: nn.Module, implementation: str) -> nn.Module:
    replaced: dict[int, Any] = {}
    for part in module.modules():
        config = getattr(part, "config", None)
        if config is None or not hasattr(config, "_attn_implementation"):
            continue
        if id(config) not in replaced:
            replaced[id(config)] = copy.deepcopy(config)
            replaced[id(config)]._attn_implementation = implementation
        part.config = replaced[id(config)]
    return module


def with_short_scans(module: nn.Module) -> nn.Module:
    """Let the scans (Mamba-2) of a copied model pad few tokens to few, and return the copy.

    transformers pads every text to a multiple of `chunk_size`, which is usually 256.
    """

    def shorten(scan: Any, args: tuple[Any, ...], options: dict[str, Any], most: int) -> None:
        count = (args[0] if args else options["hidden_states"]).shape[1]
        scan.chunk_size = min(most, max(16, 1 << (count - 1).bit_length()))

    for part in module.modules():
        if hasattr(part, "ssm_state_size") and isinstance(part.chunk_size, int):
            hook = partial(shorten, most=part.chunk_size)
            part.register_forward_pre_hook(hook, with_kwargs=True)
    return module


class Modules(NamedTuple):
    """Layers and output embeddings to compute with.

    Attributes:
        is_packed: whether the weights are copies that are reordered for the CPU.
        num_fused: number of layers that compute with few operators.
        versions: versions of the model's parameters when they were copied; empty without copies.
    """

    layers: nn.Module
    output: nn.Module
    is_packed: bool = False
    num_fused: int = 0
    versions: tuple[object, ...] = ()


class ComputeModules:
    """Chooses the layers and output embeddings to compute with; the model itself never changes.

    All adapters of a model share its copies.
    """

    def __init__(self, model: CausalLM, decoder: nn.Module) -> None:
        self._model = cast(PreTrainedModel, model)  # a PEFT model behaves like the wrapped model
        self._decoder = decoder
        self.is_batch_invariant, self._reorders = False, True
        self._trial: Trial | None = None
        self._use(self._originals())

    def _use(self, modules: Modules) -> None:
        self.layers, self.output, self.is_packed, self.num_fused, self._copied = modules

    def fuse(self, trial: Trial, *, batch_invariant: bool = False, reorders: bool = True) -> None:
        """Compute with layers of few operators and, on a CPU, with joined and reordered weights.

        Weights are copied only if there is memory for them, and there are no adapters, which may be
        switched on and off.

        Args:
            batch_invariant: whether a token has the same features, bit for bit, whether it is read
                alone, in a tree, in a prompt, or beside other sequences. Attention is then rounded
                independently of other tokens, and parts such as experts and routers are replaced by
                `with_independent_rows`. The other linear layers must not depend on the number of
                tokens, if there are at least two, which `check_batch_invariance` verifies.
            reorders: whether weights may be reordered.
        """
        if batch_invariant:
            refuse_invariance_if(obstacle_to_invariance(self._model))
        self._trial, self.is_batch_invariant, self._reorders = trial, batch_invariant, reorders
        self._choose()

    def follow_changes(self) -> None:
        """Copy the weights again if the model's were replaced or changed in place."""
        if self._copied and self._copied != self._versions():
            if self.is_batch_invariant:
                refuse_invariance_if(obstacle_to_invariance(self._model))
            self._choose()

    def _originals(self) -> Modules:
        return Modules(self._decoder, self._model.get_output_embeddings())

    def _versions(self) -> tuple[object, ...]:
        return tuple((id(weight), *version_of(weight)) for weight in self._model.parameters())

    def _choose(self) -> None:
        if has_adapters(self._model):
            self._use(self._originals())
            return
        copies = _copies.setdefault(self._model, {})
        key = self.is_batch_invariant, self._reorders
        if key not in copies or copies[key].versions != self._versions():
            copies[key] = self._copy()
        self._use(copies[key])

    def _copy(self) -> Modules:
        assert self._trial is not None
        layers = self._with_attention(sharing_copy(self._decoder))
        output = sharing_copy(self._originals().output)
        most = MEMORY_SHARE * psutil.virtual_memory().available
        is_packed = self._reorders and can_pack(self._model) and packed_bytes(self._model) <= most
        make = partial(self._product, MappedMemory()) if is_packed else None
        like = next(self._decoder.parameters())
        expected = self._trial.features(self._decoder, like)
        num_fused = fuse_decoder(layers, self._trial, make)
        if num_fused and not are_alike(self._trial.features(layers, like), expected):
            layers, num_fused = self._with_attention(sharing_copy(self._decoder)), 0
        if make is not None:  # the layers that are not fused, too
            layers, output = (with_products(part, make) for part in (layers, output))
        if self.is_batch_invariant:
            dtype = self._model.dtype
            layers, output = (with_independent_rows(part, dtype) for part in (layers, output))
        return Modules(layers, output, is_packed, num_fused, self._versions())

    def _with_attention(self, layers: nn.Module) -> nn.Module:
        layers = with_short_scans(layers)
        if self.is_batch_invariant:
            return with_attention(layers, BATCH_INVARIANT)
        is_sdpa = self._model.config.get_text_config()._attn_implementation == "sdpa"
        return with_attention(layers, GROUPED) if is_sdpa else layers

    def _product(self, mapped: MappedMemory, layers: Sequence[nn.Linear]) -> nn.Module:
        weight, bias = join_weights(layers)
        if self.is_batch_invariant and weight.numel() <= SMALL:
            return DoubleLinear(weight, bias)
        product = PackedLinear(weight, bias)
        for layer in layers:
            mapped.give_back(layer.weight)
        return product


# By model, and by whether they are batch-invariant and may be reordered.
_copies: WeakKeyDictionary[PreTrainedModel, dict[tuple[bool, bool], Modules]] = WeakKeyDictionary()


def refuse_invariance_if(obstacle: str | None) -> None:
    if obstacle is not None:
        raise TargetNotSupported(
            "the target cannot be made batch-invariant",
            expected="half precision on a CPU, with sdpa or eager attention that transformers can "
            "replace, without adapters, not compiled",
            got=obstacle,
            remedy="decode without batch_invariant; in float32, rounding hardly ever matters",
        )
