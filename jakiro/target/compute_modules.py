"""The modules that a target computes with: the model's own, or copies that share its tensors."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, cast
from weakref import WeakKeyDictionary

import psutil
from torch import nn
from transformers import PreTrainedModel

from jakiro.errors import TargetNotSupported
from jakiro.target.attention import (
    BATCH_INVARIANT,
    GROUPED,
    obstacle_to_invariance,
)
from jakiro.target.checks import CausalLM
from jakiro.target.fused_decoder import Trial, are_alike, fuse_decoder
from jakiro.target.independent_rows import SMALL, DoubleLinear, with_independent_rows
from jakiro.target.mapped_memory import MappedMemory
from jakiro.target.packed_linear import (
    PackedLinear,
    can_pack,
    has_adapters,
    joined_weights,
    packed_bytes,
    with_products,
)
from jakiro.target.sharing import sharing_copy, with_attention
from jakiro.target.weight_copies import version_of

MEMORY_SHARE = 0.5  # largest share of the available memory that copied weights may take


class Modules(NamedTuple):
    """Layers and output embeddings to compute with.

    Attributes:
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
        self._chosen = self._own

    @property
    def layers(self) -> nn.Module:
        """The decoder, or a copy of it."""
        return self._chosen.layers

    @property
    def output(self) -> nn.Module:
        """The output embeddings, or a copy of them."""
        return self._chosen.output

    @property
    def is_packed(self) -> bool:
        """Whether the weights are copies that are reordered for the CPU."""
        return self._chosen.is_packed

    @property
    def num_fused(self) -> int:
        """The number of layers that compute with few operators."""
        return self._chosen.num_fused

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
        if self._chosen.versions and self._chosen.versions != self._versions():
            if self.is_batch_invariant:
                refuse_invariance_if(obstacle_to_invariance(self._model))
            self._choose()

    @property
    def _own(self) -> Modules:
        return Modules(self._decoder, self._model.get_output_embeddings())

    def _versions(self) -> tuple[object, ...]:
        return tuple((id(weight), *version_of(weight)) for weight in self._model.parameters())

    def _choose(self) -> None:
        if has_adapters(self._model):
            self._chosen = self._own
            return
        copies = _copies.setdefault(self._model, {})
        key = self.is_batch_invariant, self._reorders
        known = copies.get(key)
        if known is None or known.versions != self._versions():
            known = copies[key] = self._copied()
        self._chosen = known

    def _copied(self) -> Modules:
        assert self._trial is not None
        layers = self._with_attention(sharing_copy(self._decoder))
        output = sharing_copy(self._own.output)
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
        if self.is_batch_invariant:
            return with_attention(layers, BATCH_INVARIANT)
        is_sdpa = self._model.config.get_text_config()._attn_implementation == "sdpa"
        return with_attention(layers, GROUPED) if is_sdpa else layers

    def _product(self, mapped: MappedMemory, layers: Sequence[nn.Linear]) -> nn.Module:
        weight, bias = joined_weights(layers)
        if self.is_batch_invariant and weight.numel() <= SMALL:
            return DoubleLinear(weight, bias)
        product = PackedLinear(weight, bias)
        for layer in layers:
            mapped.give_back(layer.weight)
        return product


# By model, and by whether they are batch-invariant and may be reordered.
_copies: WeakKeyDictionary[PreTrainedModel, dict[tuple[bool, bool], Modules]] = WeakKeyDictionary()


def refuse_invariance_if(obstacle: str | None) -> None:
    """Raise an error if something prevents batch invariance."""
    if obstacle is not None:
        raise TargetNotSupported(
            "the target cannot be made batch-invariant",
            expected="half precision on a CPU, with sdpa or eager attention that transformers can "
            "replace, without adapters, not compiled",
            got=obstacle,
            remedy="decode without batch_invariant; in float32, rounding hardly ever matters",
        )
