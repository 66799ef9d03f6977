"""Adapter of the frozen target: the only code that accesses the Hugging Face causal LM."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from jakiro.errors import TargetNotSupported
from jakiro.target.attention_shape import AttentionShape, attention_shape_of
from jakiro.target.cache import HeadShape, SlotCache
from jakiro.target.checks import (
    CausalLM,
    check_adapter,
    check_positions,
    check_reproduces,
    head_shape_of,
    layer_kinds_of,
    max_position_of,
    storing_layers,
)
from jakiro.target.cpu_attention import BATCH_INVARIANT, GROUPED, obstacle_to_invariance
from jakiro.target.masks import (
    Masks,
    TargetMasks,
    ancestor_matrix,
    positions_in_slots,
    same_document,
    slot_mask,
)
from jakiro.target.packed_linear import can_pack, form_name, packed_copy, with_packed_layers
from jakiro.target.sharing import sharing_copy, with_attention
from jakiro.utils.files import fingerprint
from jakiro.utils.gguf import gguf_checksum


@dataclass(frozen=True)
class TargetSpec:
    """Properties of a target that drafters depend on.

    Attributes:
        hidden_size: width of embeddings and features.
        vocab_size: number of logits.
        head_shapes: geometry of the keys and values of each layer that stores keys and values.
        layer_kinds: attention kind of each layer.
        window: number of positions, including the query's own, that a query attends to in a layer
            with sliding attention; None if no layer has a window.
        chunk: number of positions per block in a layer with chunked attention, where a query
            attends only to its own block; None if no layer is chunked.
        max_position: number of positions that the target supports.
        fingerprint: hash of the geometry and of a sample of the weights, the same in every dtype.
        num_hidden_states: number of hidden states (the embedding and one per layer); None if the
            hidden states are not one vector of the hidden size per token.
        attention: geometry of the last layer's attention.
        gguf_sha256: checksum of the GGUF file that the target was converted from; None if the
            target was not converted.
    """

    hidden_size: int
    vocab_size: int
    head_shapes: tuple[HeadShape, ...]
    layer_kinds: tuple[str, ...]
    window: int | None
    chunk: int | None
    max_position: int
    fingerprint: str
    num_hidden_states: int | None
    attention: AttentionShape
    gguf_sha256: str | None = None

    @property
    def num_layers(self) -> int:
        """The number of layers that store their own keys and values."""
        return len(self.head_shapes)

    @property
    def kv_widths(self) -> tuple[int, ...]:
        """For each layer, the total size of the key and the value vectors of one token."""
        return tuple(s.num_kv_heads * (s.key_dim + s.value_dim) for s in self.head_shapes)


class WrittenNodes(NamedTuple):
    """Cached nodes of a tree that is processed level by level, including this step's queries.

    Attributes:
        slots: cache slot of each node.
        positions: absolute position of each node.
        seen: True where a query may attend to a node.
    """

    slots: Int[Tensor, "batch written"]
    positions: Int[Tensor, "batch written"]
    seen: Bool[Tensor, "batch queries written"]


@dataclass(frozen=True)
class StepInput:
    """Tokens for one target forward pass: a prompt, a single token, or a root with its draft tree.

    Attributes:
        token_ids: ids of the tokens, which are the queries of the attention.
        positions: absolute positions of the queries.
        slots: cache slots that the queries are written to.
        lengths: number of committed tokens per sequence; every query attends to all of them.
        highest_slot: highest slot that any sequence writes, as a number on the CPU.
        parents: index of each query's parent among the queries, -1 for a query without a parent;
            None for a chain.
        max_depth: number of nodes on the longest path among the queries; unused for a chain.
        documents: index of each query's document in a packed sequence, where documents do not
            attend to each other; None if each sequence is one document.
        written: all cached nodes of a tree that is processed in several steps, used instead of
            `parents`; None if this step processes the whole tree.
    """

    token_ids: Int[Tensor, "batch queries"]
    positions: Int[Tensor, "batch queries"]
    slots: Int[Tensor, "batch queries"]
    lengths: Int[Tensor, " batch"]
    highest_slot: int
    parents: Int[Tensor, "batch queries"] | None = None
    max_depth: int = 1
    documents: Int[Tensor, "batch queries"] | None = None
    written: WrittenNodes | None = None


@dataclass(frozen=True)
class StepOutput:
    """Result of a target forward pass: features (after the final norm) and the updated cache.

    Attributes:
        features: feature of each query.
        step: input of the forward pass.
        cache: cache that holds the queries' keys and values at `step.slots`.
    """

    features: Float[Tensor, "batch queries hidden"]
    step: StepInput
    cache: SlotCache


def compile_mode(device: torch.device) -> str | None:
    """Return the `torch.compile` mode for small steps, which uses CUDA graphs on a GPU."""
    return "reduce-overhead" if device.type == "cuda" else None


class TargetAdapter:
    """Runs a causal LM over chains and trees of tokens with a `SlotCache`; never changes weights.

    Args:
        model: any Hugging Face decoder-only causal LM in which every layer is an attention layer,
            with or without a PEFT adapter inside its layers. The logits of a model on the meta
            device, which has only shapes, are not checked.

    Raises:
        TargetNotSupported: a layer has a recurrent state, the model's `forward` does not take
            positions, or the adapter does not reproduce the model's own logits.
    """

    def __init__(self, model: CausalLM) -> None:
        check_adapter(model)
        self.model = cast(PreTrainedModel, model)  # a PEFT model behaves like the wrapped model
        self.config = model.config.get_text_config()
        self.decoder = _decoder_of(model)
        self.head = model.get_output_embeddings()
        self._embeddings = model.get_input_embeddings()
        self._table: Tensor = self._embeddings.weight  # type: ignore[assignment]
        self._compiled: Callable[[StepInput, SlotCache, int], Tensor] | None = None
        # The modules that compute: the model's own, or copies that share its tensors.
        self._layers: nn.Module = self.decoder
        self._output: nn.Module = self.head
        self.is_packed = False  # whether the copies compute with reordered weights
        self._packs_single = False
        self.is_batch_invariant = False
        self._copied: list[nn.Parameter] = []  # parameters of which the modules are copies
        self.spec = self._probe()

    @property
    def device(self) -> torch.device:
        """The device of the embeddings."""
        return self._table.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of features and cache."""
        return self._table.dtype

    def new_cache(
        self, batch: int, capacity: int, hidden_states: tuple[int, ...] = ()
    ) -> SlotCache:
        """Return an empty cache for sequences of up to `capacity` tokens, including drafted tokens.

        Args:
            batch: number of sequences.
            capacity: number of slots per sequence.
            hidden_states: indices of the hidden states that are cached for every token, in addition
                to keys and values.
        """
        self._follow_changes()
        return SlotCache(
            self.spec.head_shapes,
            batch,
            capacity,
            self.dtype,
            self.device,
            hidden_states,
            self.spec.hidden_size,
        )

    def embed(self, token_ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch hidden"]:
        """Return the target's own token embeddings."""
        return self._embeddings(token_ids)

    def logits(self, features: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
        """Return the target's logits for features, including the scaling of its model family."""
        if self.is_batch_invariant and features.numel() == features.shape[-1]:
            twice = features.reshape(1, -1).expand(2, -1)
            return self.adjusted(self._output(twice)[0]).reshape(*features.shape[:-1], -1)
        return self.adjusted(self._output(features))

    def adjusted(self, logits: Float[Tensor, "*batch tokens"]) -> Float[Tensor, "*batch tokens"]:
        """Return the head's raw logits after the model family's scaling and soft-capping."""
        if (divisor := getattr(self.config, "logits_scaling", None)) is not None:
            logits = logits / divisor
        if (factor := getattr(self.config, "logit_scale", None)) is not None:
            logits = logits * factor
        if (cap := getattr(self.config, "final_logit_softcapping", None)) is not None:
            logits = cap * torch.tanh(logits / cap)
        return logits

    def forward(self, step: StepInput, cache: SlotCache) -> StepOutput:
        """Run the target on tokens and return their features.

        Args:
            step: tokens to read.
            cache: cache of the sequences; keys and values of the tokens are written to it.
        """
        if self.is_batch_invariant and step.token_ids.numel() == 1:
            features = self.forward(_with_sibling(step), cache).features[:, :1]
            return StepOutput(features, step, cache)
        num_visible = cache.visible_for(step.highest_slot)
        cache.set_slots(step.slots, num_visible)
        # Only decoding steps are compiled, because compiling for each prompt length takes too long.
        is_decoding = step.parents is not None or step.written is not None
        read = self._compiled if self._compiled is not None and is_decoding else self._read
        return StepOutput(read(step, cache, num_visible), step, cache)

    def compile(self) -> None:
        """Compile decoding steps; the first step of each shape then takes about a minute.

        Raises:
            TargetNotSupported: the target is batch-invariant, which compiled code is not.
        """
        if self.is_batch_invariant:
            raise TargetNotSupported(
                "a batch-invariant target cannot be compiled", remedy="create another adapter"
            )
        self._compiled = torch.compile(self._read, mode=compile_mode(self.device))

    def pack(self, *, single: bool = False) -> None:
        """Compute with weights that are reordered for the CPU.

        The model itself does not change. The reordered weights need as much memory again.

        Args:
            single: whether to use the reordered weights for a single token, too.

        Raises:
            TargetNotSupported: the weights, the device or the installed torch do not allow it.
        """
        if not can_pack(self.model):
            raise TargetNotSupported(
                "the weights of the target cannot be reordered",
                expected="float32 (or bfloat16, if the processor supports it) on a CPU, without "
                "adapters and quantization",
                got=f"{str(self.dtype).removeprefix('torch.')} on {self.device}",
                remedy="decode without packed weights",
            )
        self.is_packed, self._packs_single = True, single
        self._choose_modules()

    def unpack(self) -> None:
        """Compute with the model's own weights again."""
        self.is_packed = False
        self._choose_modules()

    def make_batch_invariant(self) -> None:
        """Compute with attention whose rounding does not depend on the other tokens of a step.

        If the products with the weights do not depend on the other tokens either, which
        `check_batch_invariance` verifies, then a token has the same features, bit for bit, whether
        it is read alone, in a tree, in a prompt, or beside other sequences.

        Raises:
            TargetNotSupported: the target is not in half precision or not on a CPU, has adapters,
                is compiled, or computes attention in a way of its own.
        """
        if self.is_compiled or (obstacle := obstacle_to_invariance(self.model)) is not None:
            raise TargetNotSupported(
                "the target cannot be made batch-invariant",
                expected="half precision on a CPU, with sdpa or eager attention, not compiled",
                got="a compiled target" if self.is_compiled else obstacle,
                remedy="decode without batch_invariant; in float32, rounding hardly ever matters",
            )
        self.is_batch_invariant = True
        self._choose_modules()

    @property
    def layers(self) -> nn.Module:
        """The layers that compute: the model's own, or a copy that shares its tensors."""
        return self._layers

    @property
    def output(self) -> nn.Module:
        """The output embeddings that compute."""
        return self._output

    def _follow_changes(self) -> None:
        """Copy the modules again if parameters of the model were replaced or added."""
        if self._copied and not self._are_current():
            self.is_packed = self.is_packed and can_pack(self.model)
            if self.is_batch_invariant:
                self.make_batch_invariant()
            self._choose_modules()

    def _are_current(self) -> bool:
        pairs = zip_longest(self._copied, self.decoder.parameters())
        return all(copied is own for copied, own in pairs)

    def _choose_modules(self) -> None:
        """Set the modules that compute."""
        self._layers, self._output, self._copied = self.decoder, self.head, []
        if not (self.is_packed or self.is_batch_invariant):
            return
        self._copied = list(self.decoder.parameters())
        self._layers = sharing_copy(self.decoder)
        if self.is_batch_invariant:
            with_attention(self._layers, BATCH_INVARIANT)
        elif self.config._attn_implementation == "sdpa":
            with_attention(self._layers, GROUPED)
        if self.is_packed:
            self._layers = with_packed_layers(self._layers, self._packs_single)
            self._output = packed_copy(self.head, pack_single=self._packs_single)

    @property
    def form(self) -> str:
        """The form of the weights that decoding computes with, in words."""
        form = form_name(self.is_packed, self._packs_single)
        return f"{form}, batch-invariant" if self.is_batch_invariant else form

    @property
    def is_compiled(self) -> bool:
        """Whether decoding steps are compiled."""
        return self._compiled is not None

    def _read(self, step: StepInput, cache: SlotCache, num_visible: int) -> Tensor:
        output = self._layers(
            input_ids=step.token_ids,
            position_ids=step.positions,
            attention_mask=self._attention_masks(step, num_visible),
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=bool(cache.hidden_states),
        )
        if cache.hidden_states:
            cache.store_hidden([output.hidden_states[k] for k in cache.hidden_states], step.slots)
        features: Tensor = output.last_hidden_state
        return features

    def _attention_masks(self, step: StepInput, num_visible: int) -> Masks:
        own = step.written or WrittenNodes(step.slots, step.positions, _ancestors(step))
        visible = slot_mask(step.lengths, own.slots, own.seen, num_visible)
        seen_positions = positions_in_slots(own.slots, own.positions, num_visible)
        return self._masks(visible, step.positions, seen_positions)

    @torch.no_grad()
    def _probe(self) -> TargetSpec:
        """Read the geometry from a short forward pass, and check the adapter's logits."""
        token_ids = torch.arange(3, device=self.device)[None]
        kinds = layer_kinds_of(self.config, self.decoder, token_ids)
        check_positions(self.config, self.decoder)
        own_cache = DynamicCache(config=self.config)
        output = self.model(
            input_ids=token_ids, past_key_values=own_cache, output_hidden_states=True
        )
        expected = output.logits
        shapes = tuple(head_shape_of(layer) for layer in storing_layers(own_cache, self.config))
        spec = TargetSpec(
            hidden_size=self._table.shape[1],
            vocab_size=expected.shape[-1],
            head_shapes=shapes,
            layer_kinds=kinds,
            window=getattr(self.config, "sliding_window", None),
            chunk=getattr(self.config, "attention_chunk_size", None),
            max_position=max_position_of(self.config),
            fingerprint=self._fingerprint(expected.shape[-1]),
            num_hidden_states=_count_states(output.hidden_states, self._table.shape[1]),
            attention=attention_shape_of(self.config, shapes[-1], self._table.shape[1]),
            gguf_sha256=gguf_checksum(self.model.config),
        )
        self.spec = spec
        self._masks = self.masks_of(kinds)
        cache = self.new_cache(1, 5)
        got = self.logits(self.forward(chain_step(token_ids, start=0), cache).features)
        check_reproduces(got, expected, type(self.model).__name__)
        self._probe_tree(cache)
        return spec

    def _probe_tree(self, cache: SlotCache) -> None:
        """Check that siblings do not attend to each other.

        Token 1 has the children 2 and 3, and token 2 has the child 4.
        """
        slots = torch.arange(5, device=self.device)[None]
        ids = slots % self.spec.vocab_size
        step = StepInput(
            token_ids=ids[:, 1:],
            positions=ids.new_tensor([[1, 2, 2, 3]]),
            slots=slots[:, 1:],
            lengths=ids.new_ones(1),
            highest_slot=4,
            parents=ids.new_tensor([[-1, 0, 0, 1]]),
            max_depth=3,
        )
        logits = self.logits(self.forward(step, cache).features)[0]
        for query, path in ((2, [0, 1, 3]), (3, [0, 1, 2, 4])):
            expected = self.model(input_ids=ids[:, path]).logits[0, -1]
            check_reproduces(logits[query], expected, type(self.model).__name__)

    def masks_of(self, layer_kinds: tuple[str, ...]) -> TargetMasks:
        """Return a builder of attention masks for layers of the given attention kinds."""
        return TargetMasks(
            layer_kinds,
            self.spec.window,
            self.spec.chunk,
            self._table,
        )

    def _fingerprint(self, vocab_size: int) -> str:
        """Hash the geometry and the signs of a few weights; signs are the same in every dtype."""
        matrices = [p for name, p in self.decoder.named_parameters() if _is_own_matrix(name, p)]
        sample = [matrices[index] for index in (0, len(matrices) // 2, -1)]
        known = [matrix for matrix in sample if not matrix.is_meta]
        signs = [(matrix[:32, :32] > 0).int().tolist() for matrix in known]
        layers = int(self.config.num_hidden_layers)
        geometry = [self.config.model_type, self.config.hidden_size, layers, vocab_size]
        return fingerprint([geometry, signs])


def _count_states(states: tuple[Tensor, ...] | None, hidden_size: int) -> int | None:
    """Return the number of hidden states, or None if any of them is not one vector per token."""
    if not states or any(state.dim() != 3 or state.shape[-1] != hidden_size for state in states):
        return None
    return len(states)


def _is_own_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter is a matrix of the model itself rather than of a LoRA adapter."""
    return parameter.ndim == 2 and "lora_" not in name


def chain_step(token_ids: Int[Tensor, "batch queries"], start: int) -> StepInput:
    """Return a step that reads consecutive tokens.

    Args:
        token_ids: ids of the tokens.
        start: position of the first token.
    """
    batch, count = token_ids.shape
    positions = torch.arange(start, start + count, device=token_ids.device).expand(batch, -1)
    lengths = torch.full((batch,), start, device=token_ids.device)
    return StepInput(token_ids, positions, positions, lengths, highest_slot=start + count - 1)


def _ancestors(step: StepInput) -> Bool[Tensor, "batch queries queries"]:
    if step.parents is not None:
        return ancestor_matrix(step.parents, step.max_depth)
    batch, count = step.token_ids.shape
    chain = torch.ones(count, count, dtype=torch.bool, device=step.token_ids.device).tril()
    if step.documents is None:
        return chain.expand(batch, -1, -1)
    return chain & same_document(step.documents)


def _decoder_of(model: CausalLM) -> nn.Module:
    """Return the part of a model below the head, whose outputs are the features."""
    decoder = model.get_decoder()
    # For Llama 4, `get_decoder` returns the text model, which includes the head.
    return decoder if decoder.get_output_embeddings() is None else decoder.model


def _with_sibling(step: StepInput) -> StepInput:
    """Return a step over a single token with a copy of the token in the next slot.

    Some kernels sum in another order for a single row than for several rows.
    """
    twice = torch.arange(2, device=step.slots.device)
    return StepInput(
        token_ids=step.token_ids.expand(-1, 2),
        positions=step.positions.expand(-1, 2),
        slots=step.slots + twice,
        lengths=step.lengths,
        highest_slot=step.highest_slot + 1,
        parents=torch.full_like(step.slots, -1).expand(-1, 2),
        max_depth=1,
    )
