"""The frozen target: one adapter through which everything else sees a Hugging Face causal LM."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

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
from jakiro.target.masks import (
    Masks,
    TargetMasks,
    ancestor_matrix,
    positions_in_slots,
    same_document,
    slot_mask,
)
from jakiro.utils.files import fingerprint


@dataclass(frozen=True)
class TargetSpec:
    """What a drafter must know about a target."""

    hidden_size: int
    vocab_size: int
    head_shapes: tuple[HeadShape, ...]  # of the layers that keep keys and values of their own
    layer_kinds: tuple[str, ...]
    window: int | None  # positions that a sliding layer sees, its own included
    chunk: int | None  # positions per block of a chunked layer, which sees its own block only
    max_position: int
    fingerprint: str
    num_hidden_states: int | None  # the embedding, one behind each layer; None: there are others
    attention: AttentionShape  # of the last layer

    @property
    def num_layers(self) -> int:
        """Number of layers that keep keys and values, all but those that reuse another's."""
        return len(self.head_shapes)

    @property
    def kv_widths(self) -> tuple[int, ...]:
        """Size of keys plus values of one token, per layer."""
        return tuple(s.num_kv_heads * (s.key_dim + s.value_dim) for s in self.head_shapes)


class Written(NamedTuple):
    """Rows of a tree that is read level by level, those of the step included."""

    slots: Int[Tensor, "batch written"]
    positions: Int[Tensor, "batch written"]
    seen: Bool[Tensor, "batch queries written"]  # which of them each query may see


@dataclass(frozen=True)
class StepInput:
    """Tokens for one target forward: a prompt, a single token, or a root with its draft tree."""

    token_ids: Int[Tensor, "batch queries"]
    positions: Int[Tensor, "batch queries"]
    slots: Int[Tensor, "batch queries"]
    lengths: Int[Tensor, " batch"]  # committed rows, all of which every query sees
    highest_slot: int  # over the batch, known on the host
    parents: Int[Tensor, "batch queries"] | None = None  # index into queries, -1: none; None: chain
    max_depth: int = 1  # longest path among the queries; unused for a chain
    documents: Int[Tensor, "batch queries"] | None = None  # packed chains, isolated by document
    written: Written | None = None  # where parts of the tree were read before; replaces `parents`


@dataclass(frozen=True)
class StepOutput:
    """What a target forward leaves: features, and rows in the cache at `step.slots`."""

    features: Float[Tensor, "batch queries hidden"]  # after the final norm
    step: StepInput
    cache: SlotCache


def compile_mode(device: torch.device) -> str | None:
    """Return how to compile small steps: on a GPU they are replayed as CUDA graphs."""
    return "reduce-overhead" if device.type == "cuda" else None


class TargetAdapter:
    """Runs a stock causal LM over chains and trees with a `SlotCache`; never changes its weights.

    Args:
        model: any Hugging Face decoder-only causal LM whose layers all attend over positions, with
            or without a PEFT adapter inside its layers; on the meta device it has shapes alone, and
            what it computes is not checked.

    Raises:
        TargetNotSupported: a layer keeps a recurrent state, positions cannot be given to the
            forward, or the adapter does not reproduce the model's own logits.
    """

    def __init__(self, model: CausalLM) -> None:
        check_adapter(model)
        self.model = cast(PreTrainedModel, model)  # a PEFT model answers like the one it wraps
        self.config = model.config.get_text_config()
        self.decoder = _decoder_of(model)
        self.head = model.get_output_embeddings()
        self._embeddings = model.get_input_embeddings()
        self._table: Tensor = self._embeddings.weight  # type: ignore[assignment]
        self._compiled: Callable[[StepInput, SlotCache, int], Tensor] | None = None
        self.spec = self._probe()

    @property
    def device(self) -> torch.device:
        """Device of the embeddings."""
        return self._table.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of features and cache."""
        return self._table.dtype

    def new_cache(
        self, batch: int, capacity: int, hidden_states: tuple[int, ...] = ()
    ) -> SlotCache:
        """Return an empty cache for sequences of up to `capacity` tokens, drafts included.

        Args:
            batch: number of sequences.
            capacity: tokens of the longest one.
            hidden_states: which hidden states it keeps of every token, see `StateSource`.
        """
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
        """Return the target's logits of features, with its family's scaling and soft-capping."""
        return self.adjusted(self.head(features))

    def adjusted(self, logits: Float[Tensor, "*batch tokens"]) -> Float[Tensor, "*batch tokens"]:
        """Return what the head computed with its family's scaling and soft-capping."""
        if (divisor := getattr(self.config, "logits_scaling", None)) is not None:
            logits = logits / divisor
        if (factor := getattr(self.config, "logit_scale", None)) is not None:
            logits = logits * factor
        if (cap := getattr(self.config, "final_logit_softcapping", None)) is not None:
            logits = cap * torch.tanh(logits / cap)
        return logits

    def forward(self, step: StepInput, cache: SlotCache) -> StepOutput:
        """Read the tokens of `step`, write their rows to the cache, and return their features."""
        num_visible = cache.visible_for(step.highest_slot)
        cache.set_slots(step.slots, num_visible)
        # A prompt has no parents; compiling for each length of prompt would never pay.
        is_decoding = step.parents is not None or step.written is not None
        read = self._compiled if self._compiled is not None and is_decoding else self._read
        return StepOutput(read(step, cache, num_visible), step, cache)

    def compile(self) -> None:
        """Compile steps of decoding; the first of each kind then takes long (about a minute)."""
        self._compiled = torch.compile(self._read, mode=compile_mode(self.device))

    @property
    def is_compiled(self) -> bool:
        """Whether steps of decoding are compiled."""
        return self._compiled is not None

    def _read(self, step: StepInput, cache: SlotCache, num_visible: int) -> Tensor:
        output = self.decoder(
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
        own = step.written or Written(step.slots, step.positions, _ancestors(step))
        visible = slot_mask(step.lengths, own.slots, own.seen, num_visible)
        seen_positions = positions_in_slots(own.slots, own.positions, num_visible)
        return self._masks(visible, step.positions, seen_positions)

    @torch.no_grad()
    def _probe(self) -> TargetSpec:
        """Read the geometry off a short forward and check that the adapter reproduces it."""
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
        )
        self.spec = spec
        self._masks = self.masks_of(kinds)
        cache = self.new_cache(1, 5)
        got = self.logits(self.forward(chain_step(token_ids, start=0), cache).features)
        check_reproduces(got, expected, type(self.model).__name__)
        self._probe_tree(cache)
        return spec

    def _probe_tree(self, cache: SlotCache) -> None:
        """Check that siblings do not see each other: token 1 has children 2 and 3, 2 has 4."""
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
        """Return what makes the attention masks of layers of these kinds."""
        return TargetMasks(
            layer_kinds,
            self.spec.window,
            self.spec.chunk,
            self._table,
        )

    def _fingerprint(self, vocab_size: int) -> str:
        """Hash the geometry and the signs of some weights, which no load dtype changes."""
        matrices = [p for name, p in self.decoder.named_parameters() if _is_own_matrix(name, p)]
        chosen = [matrices[place] for place in (0, len(matrices) // 2, -1)]
        known = [matrix for matrix in chosen if not matrix.is_meta]
        signs = [(matrix[:32, :32] > 0).int().tolist() for matrix in known]
        layers = int(self.config.num_hidden_layers)
        geometry = [self.config.model_type, self.config.hidden_size, layers, vocab_size]
        return fingerprint([geometry, signs])


def _count_states(states: tuple[Tensor, ...] | None, hidden_size: int) -> int | None:
    """Return how many hidden states there are, if each is one vector per token."""
    if not states or any(one.dim() != 3 or one.shape[-1] != hidden_size for one in states):
        return None
    return len(states)


def _is_own_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a matrix of the model itself, not of an adapter beside it."""
    return parameter.ndim == 2 and "lora_" not in name


def chain_step(token_ids: Int[Tensor, "batch queries"], start: int) -> StepInput:
    """Return the step that reads consecutive tokens at positions `start`, `start + 1`, ..."""
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
    """Return the part of a model that ends in features, below the head."""
    decoder = model.get_decoder()
    # Llama 4 answers with the text model that holds the head.
    return decoder if decoder.get_output_embeddings() is None else decoder.model
