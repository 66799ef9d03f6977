"""The modules that a target computes with: the model's own, or copies that share its tensors."""

from itertools import zip_longest
from typing import cast

from torch import nn
from transformers import PreTrainedModel

from jakiro.errors import TargetNotSupported
from jakiro.target.attention import (
    BATCH_INVARIANT,
    GROUPED,
    obstacle_to_invariance,
)
from jakiro.target.checks import CausalLM
from jakiro.target.independent_rows import with_independent_rows
from jakiro.target.packed_linear import can_pack, form_name, packed_copy, with_packed_layers
from jakiro.target.sharing import sharing_copy, with_attention


class ComputeModules:
    """Chooses the layers and output embeddings to compute with; the model itself never changes.

    Attributes:
        groups_heads: whether the query heads that share keys are computed as one head, so that keys
            and values are not repeated; always true with reordered weights.
    """

    def __init__(self, model: CausalLM, decoder: nn.Module) -> None:
        self._model = cast(PreTrainedModel, model)  # a PEFT model behaves like the wrapped model
        self._decoder = decoder
        self.layers = decoder
        self.output: nn.Module = model.get_output_embeddings()
        self.is_packed = False
        self.groups_heads = False
        self.is_batch_invariant = False
        self._packs_single = False
        self._copied: list[nn.Parameter] = []  # parameters of the modules that were copied

    @property
    def form(self) -> str:
        """A description of the weights that decoding computes with."""
        form = form_name(self.is_packed, self._packs_single)
        return f"{form}, batch-invariant" if self.is_batch_invariant else form

    def pack(self, *, single: bool = False) -> None:
        """Compute with weights that are reordered for the CPU.

        The reordered weights are copies, so the target needs twice the memory.
        """
        if not can_pack(self._model):
            raise TargetNotSupported(
                "the weights of the target cannot be reordered",
                expected="float32 (or bfloat16, if the processor supports it) on a CPU, without "
                "adapters and quantization",
                got=f"{str(self._model.dtype).removeprefix('torch.')} on {self._model.device}",
                remedy="decode without packed weights",
            )
        self.is_packed, self._packs_single = True, single
        self._choose()

    def group_heads(self) -> None:
        """Do not repeat keys and values in attention, if transformers computes it with sdpa."""
        self.groups_heads = True
        self._choose()

    def unpack(self) -> None:
        """Compute with the model's own weights again."""
        self.is_packed = False
        self._choose()

    def make_batch_invariant(self) -> None:
        """Compute with attention whose rounding does not depend on the other tokens of a step.

        Parts such as experts and routers are replaced by `with_independent_rows`. The other linear
        layers must not depend on the number of tokens, if there are at least two, which
        `check_batch_invariance` verifies. Then a token has the same features, bit for bit, whether
        it is read alone, in a tree, in a prompt, or beside other sequences.
        """
        refuse_invariance_if(obstacle_to_invariance(self._model))
        self.is_batch_invariant = True
        self._choose()

    def follow_changes(self) -> None:
        """Copy the modules again if parameters of the model were replaced, added or removed."""
        if self._copied and not self._are_current():
            self.is_packed = self.is_packed and can_pack(self._model)
            if self.is_batch_invariant:
                self.make_batch_invariant()
            self._choose()

    def _are_current(self) -> bool:
        pairs = zip_longest(self._copied, self._decoder.parameters())
        return all(copied is own for copied, own in pairs)

    def _choose(self) -> None:
        self.layers, self.output = self._decoder, self._model.get_output_embeddings()
        self._copied = []
        if not (self.is_packed or self.groups_heads or self.is_batch_invariant):
            return
        self._copied = list(self._decoder.parameters())
        self.layers = sharing_copy(self._decoder)
        if self.is_batch_invariant:
            with_attention(self.layers, BATCH_INVARIANT)
        elif self._model.config.get_text_config()._attn_implementation == "sdpa":
            with_attention(self.layers, GROUPED)
        if self.is_packed:
            self.layers = with_packed_layers(self.layers, self._packs_single)
            self.output = packed_copy(self.output, pack_single=self._packs_single)
        if self.is_batch_invariant:
            dtype = self._model.dtype
            self.layers = with_independent_rows(self.layers, dtype)
            self.output = with_independent_rows(sharing_copy(self.output), dtype)


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
