"""Adapter of the frozen target, which runs a Hugging Face causal LM over chains and trees."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from jakiro.errors import TargetNotSupported
from jakiro.target.attention import without_cudnn
from jakiro.target.attention_shape import (
    AttentionShape,
    HeadShape,
    KeyRotation,
    attention_shape_of,
)
from jakiro.target.cache import SlotCache
from jakiro.target.checks import (
    ATTENTION_KINDS,
    CausalLM,
    cache_argument,
    check_model,
    check_positions,
    check_reproduces,
    check_same,
    head_shape_of,
    layer_kinds_of,
    max_position_of,
    measure_rotation,
    naming_recurrence,
    storing_layers,
)
from jakiro.target.compute_modules import ComputeModules, refuse_invariance_if
from jakiro.target.ends import TargetEnds
from jakiro.target.fused_decoder import Trial
from jakiro.target.recurrence import Layout
from jakiro.target.step import (
    Masks,
    StepInput,
    StepOutput,
    TargetMasks,
    WrittenNodes,
    ancestors_of,
    chain_step,
    positions_in_slots,
    slot_mask,
    with_sibling,
)
from jakiro.utils.fetch import gguf_checksum
from jakiro.utils.files import fingerprint


@dataclass(frozen=True)
class TargetSpec:
    """Properties of a target that drafters depend on.

    Attributes:
        window: number of positions, including the query's own, that a query attends to in a layer
            with sliding attention; None if no layer has a window.
        chunk: number of positions per block in a layer with chunked attention, where a query
            attends only to its own block; None if no layer is chunked.
        fingerprint: hash of the geometry and of a sample of the weights, the same in every dtype.
        num_hidden_states: number of hidden states (the embedding and one per layer); None if the
            hidden states are not one vector of the hidden size per token.
        key_rotation: rotation of cached keys; None unless it is the same in all layers.
        layout: which layers have recurrent states; None if no layer has any.
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
    key_rotation: KeyRotation | None = None
    layout: Layout | None = None

    @property
    def is_recurrent(self) -> bool:
        """Whether some layers are recurrent, so that drafts are chains, not trees."""
        return self.layout is not None

    @property
    def replays(self) -> bool:
        """Whether tokens that were accepted are read again with later chains."""
        return self.layout is not None and self.layout.replays

    @property
    def num_layers(self) -> int:
        """The number of layers that store their own keys and values."""
        return len(self.head_shapes)

    @property
    def kv_widths(self) -> tuple[int, ...]:
        """For each layer, the total size of the key and the value vectors of one token."""
        return tuple(s.num_kv_heads * (s.key_dim + s.value_dim) for s in self.head_shapes)


def compile_mode(device: torch.device) -> str | None:
    """Return the `torch.compile` mode for small steps, which uses CUDA graphs on a GPU."""
    return "reduce-overhead" if device.type == "cuda" else None


class TargetAdapter(TargetEnds):
    """Runs a causal LM over chains and trees of tokens with a `SlotCache`; never changes weights.

    Args:
        model: any Hugging Face decoder-only causal LM with attention layers and, possibly,
            recurrent ones, with or without a PEFT adapter inside its layers. The logits of a model
            on the meta device, which has only shapes, are not checked.
    """

    def __init__(self, model: CausalLM) -> None:
        check_model(model)
        self.model = cast(PreTrainedModel, model)  # a PEFT model behaves like the wrapped model
        self.config = model.config.get_text_config()
        self.decoder = _decoder_of(model)
        self.head = model.get_output_embeddings()
        self._embeddings = model.get_input_embeddings()
        self.like: Tensor = self._embeddings.weight  # type: ignore[assignment]
        self._compiled: Callable[[StepInput, SlotCache, int], Tensor] | None = None
        self._cache_argument = cache_argument(self.decoder)
        self.modules = ComputeModules(model, self.decoder)
        self.spec = self._probe()

    def new_cache(
        self, batch: int, capacity: int, hidden_states: tuple[int, ...] = ()
    ) -> SlotCache:
        """Return an empty cache for sequences of up to `capacity` tokens, including drafted tokens.

        Args:
            hidden_states: indices of the hidden states that are cached for every token, in addition
                to keys and values.
        """
        self.modules.follow_changes()
        sizes = (self.spec.head_shapes, batch, capacity)
        states = (hidden_states, self.spec.hidden_size)
        layout = self.spec.layout
        return SlotCache(*sizes, self.dtype, self.device, *states, layout=layout)

    def embed(self, token_ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch hidden"]:
        return self._embeddings(token_ids)

    def logits(self, features: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
        """Return the target's logits for features, including the scaling of its model family."""
        if self.modules.is_batch_invariant and features.numel() == features.shape[-1]:
            twice = features.reshape(1, -1).expand(2, -1)
            return self.adjusted(self.modules.output(twice)[0]).reshape(*features.shape[:-1], -1)
        return self.adjusted(self.modules.output(features))

    @property
    def head_is_packed(self) -> bool:
        return self.modules.is_packed

    def forward(self, step: StepInput, cache: SlotCache) -> StepOutput:
        if self.modules.is_batch_invariant and step.token_ids.numel() == 1:
            features = self.forward(with_sibling(step), cache).features[:, :1]
            return StepOutput(features, step, cache)
        num_visible = cache.visible_for(step.highest_slot)
        cache.set_slots(step.slots, num_visible, step.rows, step.start)
        # Only decoding steps are compiled, because compiling for each prompt length takes too long.
        is_decoding = step.parents is not None or step.written is not None
        read = self._compiled if self._compiled is not None and is_decoding else self._read
        with without_cudnn(self.device):
            return StepOutput(read(step, cache, num_visible), step, cache)

    def need_trees(self, what: str) -> None:
        """Raise an error if the target verifies only chains, which something does not draft."""
        if self.spec.is_recurrent:
            raise TargetNotSupported(
                f"{what} cannot be used with a target that has recurrent layers",
                got=type(self.model).__name__,
            )

    def compile(self) -> None:
        self.need_trees("compiled=True")
        if self.modules.is_batch_invariant:
            raise TargetNotSupported(
                "a batch-invariant target cannot be compiled", remedy="create another adapter"
            )
        self._compiled = torch.compile(self._read, mode=compile_mode(self.device))

    def fuse(self, *, batch_invariant: bool = False, reorders: bool = True) -> None:
        """Compute with layers of few operators and reordered weights; see `ComputeModules.fuse`."""
        refuse_invariance_if("a compiled target" if batch_invariant and self.is_compiled else None)
        if batch_invariant:
            self.need_trees("batch_invariant=True")
        trial = Trial(self._trial_cache, self.spec.max_position, self._run)
        self.modules.fuse(trial, batch_invariant=batch_invariant, reorders=reorders)

    def _trial_cache(self, like: Tensor) -> SlotCache:
        sizes, layout = (self.spec.head_shapes, 1, 16), self.spec.layout
        return SlotCache(*sizes, like.dtype, like.device, layout=layout)

    @property
    def is_compiled(self) -> bool:
        return self._compiled is not None

    def _read(self, step: StepInput, cache: SlotCache, num_visible: int) -> Tensor:
        return self._run(self.modules.layers, step, cache, num_visible)

    def _run(
        self, layers: nn.Module, step: StepInput, cache: SlotCache, num_visible: int
    ) -> Tensor:
        output = layers(
            input_ids=step.token_ids,
            position_ids=step.positions,
            attention_mask=self._attention_masks(step, num_visible),
            use_cache=True,
            output_hidden_states=bool(cache.hidden_states),
            **{self._cache_argument: cache},
        )
        if cache.hidden_states:
            hidden = [output.hidden_states[k] for k in cache.hidden_states]
            cache.store_hidden(hidden, step.slots, step.rows)
        features: Tensor = output.last_hidden_state
        return features

    def _attention_masks(self, step: StepInput, num_visible: int) -> Masks:
        nodes = step.written or WrittenNodes(step.slots, step.positions, ancestors_of(step))
        visible = slot_mask(step.lengths, nodes.slots, nodes.seen, num_visible)
        seen_positions = None
        if self._masks.reads_positions:
            seen_positions = positions_in_slots(nodes.slots, nodes.positions, num_visible)
        return self._masks(visible, step.positions, seen_positions)

    @torch.no_grad()
    def _probe(self) -> TargetSpec:
        """Read the geometry from a short forward pass, and check the adapter's logits."""
        token_ids = torch.arange(3, device=self.device)[None]
        kinds = layer_kinds_of(self.config, self.decoder, token_ids)
        check_positions(self.config, self.decoder)
        with naming_recurrence(self.model) if set(kinds) - ATTENTION_KINDS else nullcontext():
            return self._probe_layers(kinds, token_ids)

    def _probe_layers(self, kinds: tuple[str, ...], token_ids: Tensor) -> TargetSpec:
        """Run the target at late positions, because some families differ only there."""
        chunk = getattr(self.config, "attention_chunk_size", None)
        max_position = max_position_of(self.config)
        start = max(0, max_position - 5) // (chunk or 1) * (chunk or 1)
        stock = DynamicCache(config=self.config)
        given = {cache_argument(self.model): stock, "position_ids": start + token_ids}
        output = self.model(input_ids=token_ids, output_hidden_states=True, **given)
        expected = output.logits
        layers = storing_layers(stock, self.config)
        layout = Layout.of(layers)
        if layout.states:
            layers = [layers[index] for index in layout.attention_layers]
        shapes = tuple(head_shape_of(layer) for layer in layers)
        spec = TargetSpec(
            hidden_size=self.like.shape[1],
            vocab_size=expected.shape[-1],
            head_shapes=shapes,
            layer_kinds=kinds,
            window=getattr(self.config, "sliding_window", None),
            chunk=chunk,
            max_position=max_position,
            fingerprint=self._fingerprint(expected.shape[-1]),
            num_hidden_states=_count_states(output.hidden_states, self.like.shape[1]),
            attention=attention_shape_of(self.config, shapes[-1], self.like.shape[1]),
            gguf_sha256=gguf_checksum(self.model.config),
            key_rotation=measure_rotation(self.decoder, shapes, partial(self._keys, token_ids)),
            layout=layout if layout.states else None,
        )
        self.spec = spec
        self._masks = self.masks_of(kinds)
        cache = self.new_cache(1, 5)
        step = replace(chain_step(token_ids, start=0), positions=start + token_ids)
        features = self.forward(step, cache).features
        if features.shape[-1] != spec.hidden_size:
            raise TargetNotSupported("the target's features are not as wide as its embeddings")
        check_reproduces(self.logits(features), expected, type(self.model).__name__)
        if spec.is_recurrent:
            self._probe_chain()
        else:
            self._probe_tree(cache, start)
        return spec

    def _keys(self, token_ids: Tensor, start: int) -> list[Tensor]:
        """Return the keys of each layer for a text that begins at a position."""
        cache = DynamicCache(config=self.config)
        positions = start + torch.arange(token_ids.shape[1], device=self.device)[None]
        given = {self._cache_argument: cache}
        self.decoder(input_ids=token_ids, position_ids=positions, use_cache=True, **given)
        layers = storing_layers(cache, self.config)
        return [layer.keys for layer in layers if getattr(layer, "keys", None) is not None]

    def _probe_chain(self) -> None:
        """Check that tokens give the same logits and states in all ways in which they may be read.

        Three tokens are read, then four from the state after them, of which one is accepted: the
        others are read once more. The same tokens are read one by one, too.
        """
        random = torch.Generator().manual_seed(0)
        ids = torch.randint(self.spec.vocab_size, (4, 7), generator=random).to(self.device)
        positions = torch.arange(7, device=self.device).expand_as(ids)
        expected = self.model(input_ids=ids, position_ids=positions).logits
        pairs: list[tuple[Tensor, Tensor]] = []
        ends_of_states: list[list[Tensor]] = []
        for ends in ([(3, 3), (7, 4), (7, 7)], [(end, end) for end in range(1, 8)]):
            states = (cache := self.new_cache(len(ids), 8)).states
            assert states is not None
            for end, accepted in ends:
                begin = states.boundaries[0]
                step = chain_step(ids[:, begin:end], begin)
                got = self.logits(self.forward(step, cache).features)
                pairs.append((got, expected[:, begin:end]))
                states.keep([accepted] * len(ids))
            ends_of_states.append(states.kept)
        # States show small differences that affect the logits of few tokens.
        check_same(pairs + list(zip(*ends_of_states, strict=True)), self.dtype)

    def _probe_tree(self, cache: SlotCache, start: int) -> None:
        """Check that siblings do not attend to each other.

        Token 1 has the children 2 and 3, and token 2 has the child 4.
        """
        slots = torch.arange(5, device=self.device)[None]
        ids = slots % self.spec.vocab_size
        step = StepInput(
            token_ids=ids[:, 1:],
            positions=start + ids.new_tensor([[1, 2, 2, 3]]),
            slots=slots[:, 1:],
            lengths=ids.new_ones(1),
            highest_slot=4,
            parents=ids.new_tensor([[-1, 0, 0, 1]]),
            max_depth=3,
        )
        # The first token's position is not its slot.
        seen = torch.cat((torch.ones_like(ids[:, 1:, None]).bool(), ancestors_of(step)), dim=-1)
        positions = start + ids.new_tensor([[0, 1, 2, 2, 3]])
        step = replace(step, written=WrittenNodes(slots, positions, seen))
        logits = self.logits(self.forward(step, cache).features)[0]
        for query, path in ((2, [0, 1, 3]), (3, [0, 1, 2, 4])):
            given = {"input_ids": ids[:, path], "position_ids": start + slots[:, : len(path)]}
            expected = self.model(**given).logits[0, -1]
            check_reproduces(logits[query], expected, type(self.model).__name__)

    def masks_of(self, layer_kinds: tuple[str, ...]) -> TargetMasks:
        reach = self.spec.window, self.spec.chunk
        return TargetMasks(layer_kinds, *reach, self.like, is_recurrent=self.spec.is_recurrent)

    def _fingerprint(self, vocab_size: int) -> str:
        """Hash the geometry and the signs of a few weights; signs are the same in every dtype."""
        named = self.decoder.named_parameters()
        matrices = [part for name, part in named if part.ndim == 2 and "lora_" not in name]
        sample = [matrices[index] for index in (0, len(matrices) // 2, -1)]
        signs = [(part[:32, :32] > 0).int().tolist() for part in sample if not part.is_meta]
        layers = int(self.config.num_hidden_layers)
        geometry = [self.config.model_type, self.config.hidden_size, layers, vocab_size]
        return fingerprint([geometry, signs])


def _count_states(states: tuple[Tensor, ...] | None, hidden_size: int) -> int | None:
    """Return the number of hidden states, or None if any of them is not one vector per token."""
    if not states or any(state.dim() != 3 or state.shape[-1] != hidden_size for state in states):
        return None
    return len(states)


def _decoder_of(model: CausalLM) -> nn.Module:
    """Return the part of a model below the head, whose outputs are the features."""
    decoder = model.get_decoder()
    if not isinstance(decoder, PreTrainedModel):  # such as a head that is called `decoder`
        decoder = model.base_model
    # For Llama 4, `get_decoder` returns the text model, which includes the head.
    return decoder if decoder.get_output_embeddings() is None else decoder.model
