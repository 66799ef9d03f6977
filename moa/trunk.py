"""The trunk: self-attention over tokens, optionally with features and cross-attention to memory."""

from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import silu

from moa import AttentionBias, InputKind, Residual, TokenInput
from moa.attention import (
    KV,
    CrossAttention,
    KVStore,
    SelfAttention,
    Stores,
    after,
    no_history,
)
from moa.layers import FeedForward, RMSNorm, Rotary

Vectors = Float[Tensor, "batch queries hidden"]
NUM_EARLIER = 2  # number of tokens before its own that a trigram contains


class FeatureInput(nn.Module):
    """Joins each token with the feature of the position before it: `[embedding(x_i); f_{i-1}]`.

    This is the input of EAGLE (arXiv 2401.15077, 2406.16858), EAGLE-3 (2503.01840) and Jakiro as
    published (2502.06282; this project differs). f is the target's own feature at verified
    positions, and the drafter's prediction at later positions.

        position            i - 1            i
        token                                x_i
        feature             f_{i-1}          the output here predicts f_i, hence x_{i+1}

    Args:
        input_norms: whether embeddings and features are normalized first, as in EAGLE-3.
        kind: "join" for a matrix that joins both to the width of features; "wide" for attention
            that reads both side by side, as in EAGLE-3, where the residual stream starts with the
            feature.
        residual: start of the residual stream with "wide": the "feature", or the "normed" feature.
    """

    def __init__(
        self,
        hidden: int,
        input_norms: bool,
        norm_eps: float = 1e-6,
        bias: bool = True,
        kind: InputKind = "join",
        residual: Residual = "feature",
    ) -> None:
        super().__init__()
        self.token_norm = RMSNorm(hidden, eps=norm_eps) if input_norms else nn.Identity()
        self.feature_norm = RMSNorm(hidden, eps=norm_eps) if input_norms else nn.Identity()
        self.join = nn.Linear(2 * hidden, hidden, bias) if kind == "join" else None
        self.is_residual_normed = residual == "normed"

    def forward(
        self, embeddings: Vectors, previous: Vectors
    ) -> tuple[Float[Tensor, "batch queries width"], Vectors]:
        """Return the input of self-attention and the start of the residual stream."""
        both = self.normed(embeddings, previous)
        if self.join is not None:
            joined = self.join(both).to(previous.dtype)  # the residual stream, also under autocast
            return joined, joined
        return both, both.chunk(2, dim=-1)[1] if self.is_residual_normed else previous

    def normed(
        self, embeddings: Vectors, previous: Vectors
    ) -> Float[Tensor, "batch queries twice_hidden"]:
        """Return the input of the joining matrix: embeddings and features, concatenated."""
        both = (self.token_norm(embeddings), self.feature_norm(previous))
        return torch.cat(both, dim=-1)


class TrigramInput(nn.Module):
    """Adds to each token's embedding a vector computed from it and the two embeddings before it.

    This is the trigram encoder of Chimera (arXiv 2402.15758):
    `x_i + W2 silu(W1 norm([x_i; x_{i-1}; x_{i-2}]))`; embeddings before the first token are zeros.
    """

    def __init__(self, hidden: int, norm_eps: float = 1e-6) -> None:
        super().__init__()
        width = (1 + NUM_EARLIER) * hidden
        self.norm = RMSNorm(width, eps=norm_eps)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, hidden, bias=False)

    def forward(
        self,
        embeddings: Float[Tensor, "batch queries hidden"],
        earlier: Float[Tensor, "batch queries earlier hidden"],
    ) -> Float[Tensor, "batch queries hidden"]:
        """Return one vector for each query."""
        joined = torch.cat((embeddings.unsqueeze(2), earlier[:, :, :NUM_EARLIER]), dim=2)
        return embeddings + self.down(silu(self.up(self.norm(joined.flatten(2)))))


class TrunkInputs(NamedTuple):
    """Features, memory and tokens that a drafter reads; an attribute is None if it is not read.

    Attributes:
        previous: the feature of the position before each query, from the target or predicted.
        memory: keys and values of verified tokens for each attention that reads them.
        earlier: embeddings of the tokens before each query, from the last one backwards; zeros
            before the first token of a text.
    """

    previous: Float[Tensor, "batch queries hidden"] | None = None
    memory: tuple[KV, ...] = ()
    mask: Bool[Tensor, "batch 1 queries memory"] | None = None
    earlier: Float[Tensor, "batch queries earlier hidden"] | None = None


class FurtherLayer(nn.Module):
    """The feed-forward network of the layer before, and self-attention (arXiv 2503.10135).

    The experts, which follow the trunk, are the feed-forward network of the last layer.

    Args:
        attention: function that builds the self-attention.
    """

    def __init__(
        self, hidden: int, width: int, norm_eps: float, attention: "partial[SelfAttention]"
    ) -> None:
        super().__init__()
        self.feed_forward = FeedForward(hidden, width, norm_eps)
        self.self_attention = attention()

    def kv(
        self,
        stream: Float[Tensor, "batch tokens hidden"],
        positions: Int[Tensor, "batch tokens"],
    ) -> KV:
        """Return the keys and values of tokens."""
        return self.self_attention.kv(self.feed_forward(stream), positions)

    def forward(
        self,
        stream: Float[Tensor, "batch queries hidden"],
        positions: Int[Tensor, "batch queries"],
        mask: Bool[Tensor, "batch 1 queries keys"],
        store: KVStore,
    ) -> Float[Tensor, "batch queries hidden"]:
        """Return the residual stream after this layer's attention.

        Args:
            store: function from the queries' own keys and values to all keys and values.
        """
        attended: Tensor = self.self_attention(self.feed_forward(stream), positions, mask, store)
        return attended


class Trunk(nn.Module):
    """Computes one vector per position from tokens and the target's state at verified positions.

    With memory only, this is the Mixture of Attentions (arXiv 2410.03804). In this case, the
    drafter's features are not fed back, so drafted tokens are the only inputs that can be wrong.
    With features only, the trunk is the attention half of EAGLE's decoder layer. With both, the
    trunk reads fed-back features and attends to the target's layers. The output at position i is
    trained to predict the target's feature at i from the tokens up to i and the target's state at
    verified positions.

    A block trunk has no cross-attention: in each layer, the queries attend to memory and to each
    other in one softmax, with the same matrices for the keys and values of both (DFlash, arXiv
    2602.06036). The queries are all rows that one pass drafts from; drafted tokens have no keys and
    values that later passes read.

    Args:
        is_block: whether self-attention attends to memory, in place of cross-attention.
        input: way to read embeddings and features, as for `FeatureInput`.
        rope_frequencies: angles per position, as for `Rotary`; None to compute them from the base.
        mlp_width: inner width of a feed-forward network between self-attention and cross-attention,
            as in the Mixture of Attentions; None for no such network.
        tokens: "single" if each query reads its own token, "trigram" if it reads the last three.
        num_layers: number of layers of self-attention, which may be 0.
    """

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rope_theta: float,
        attends_memory: bool = True,
        reads_features: bool = False,
        input_norms: bool = True,
        attention_norm: bool = True,
        norm_eps: float = 1e-6,
        input_bias: bool = True,
        attention_bias: AttentionBias = "none",
        qk_norm: bool = False,
        input: InputKind = "join",  # noqa: A002 (the name of the setting)
        residual: Residual = "feature",
        rope_frequencies: tuple[float, ...] | None = None,
        rope_scale: float = 1.0,
        mlp_width: int | None = None,
        tokens: TokenInput = "single",
        num_layers: int = 1,
        layer_width: int = 1,
        is_block: bool = False,
    ) -> None:
        super().__init__()
        self.trigram = TrigramInput(hidden, norm_eps) if tokens == "trigram" else None
        rotary = partial(Rotary, head_dim, rope_theta, rope_frequencies, rope_scale)
        geometry = (hidden, num_heads, num_kv_heads, head_dim, rope_theta, norm_eps)
        self.feature_input = (
            FeatureInput(hidden, input_norms, norm_eps, input_bias, input, residual)
            if reads_features
            else None
        )
        width = 2 * hidden if reads_features and input == "wide" else hidden
        self.self_attention: SelfAttention | None = None
        if num_layers:
            self.self_attention = SelfAttention(
                *geometry, attention_norm, attention_bias, qk_norm, width, rotary()
            )
        again = partial(
            SelfAttention, *geometry, attention_norm, attention_bias, qk_norm, hidden, rotary()
        )
        self.further_layers = nn.ModuleList(
            FurtherLayer(hidden, layer_width, norm_eps, again) for _ in range(num_layers - 1)
        )
        self.feed_forward = None if mlp_width is None else FeedForward(hidden, mlp_width, norm_eps)
        self.memory_norm = RMSNorm(hidden, eps=norm_eps) if is_block else None
        attends_memory &= not is_block
        self.cross_attention = CrossAttention(*geometry, rotary()) if attends_memory else None

    @property
    def kv_shapes(self) -> list[list[tuple[int, int]]]:
        """For each layer of self-attention, the shapes of the keys and values that it keeps."""
        if self.memory_norm is not None:
            return []
        return [layer.kv_shapes for layer in self.self_attentions]

    @property
    def memory_shapes(self) -> list[tuple[int, int]]:
        """The shapes of the keys and values that `memory_kv` returns."""
        return [shape for layer in self._memory_readers for shape in layer.kv_shapes]

    @property
    def self_attentions(self) -> list[SelfAttention]:
        """The self-attention of each layer."""
        return [module for module in self.modules() if isinstance(module, SelfAttention)]

    @property
    def _memory_readers(self) -> "list[SelfAttention] | list[CrossAttention]":
        if self.memory_norm is not None:
            return self.self_attentions
        return [] if self.cross_attention is None else [self.cross_attention]

    def memory_kv(
        self,
        memory: Float[Tensor, "batch tokens *layers hidden"],
        positions: Int[Tensor, "batch tokens"],
    ) -> tuple[KV, ...]:
        """Return the keys and values of memory for each attention that reads it.

        Args:
            memory: memory that all layers share, or one memory for each layer.
        """
        if self.cross_attention is not None:
            return (self.cross_attention.kv(memory, positions),)
        if self.memory_norm is None:
            return ()
        layers = self.self_attentions
        normed = self.memory_norm(memory)
        each = normed.unbind(2) if memory.dim() == 4 else (normed,) * len(layers)
        pairs = zip(layers, each, strict=True)
        return tuple(layer.kv_of_normed(part, positions) for layer, part in pairs)

    def kv(
        self,
        embeddings: Float[Tensor, "batch tokens hidden"],
        positions: Int[Tensor, "batch tokens"],
        previous: Float[Tensor, "batch tokens hidden"] | None = None,
        earlier: Float[Tensor, "batch tokens earlier hidden"] | None = None,
    ) -> KV:
        """Return the keys and values of tokens in the first layer of self-attention.

        If the trunk reads no features, keys and values depend only on a token, its position and,
        with trigrams, on the two tokens before it, so those of accepted tokens are never
        recomputed.
        """
        assert self.self_attention is not None
        inputs = TrunkInputs(previous, earlier=earlier)
        return self.self_attention.kv(self._start(embeddings, inputs)[0], positions)

    def forward(
        self,
        embeddings: Float[Tensor, "batch queries hidden"],
        positions: Int[Tensor, "batch queries"],
        self_mask: Bool[Tensor, "batch 1 queries keys"],
        inputs: TrunkInputs,
        store: Stores = no_history,
    ) -> Float[Tensor, "batch queries hidden"]:
        """Return the trunk's vector for each query.

        Args:
            inputs: features of the positions before the queries, and memory of verified tokens.
            store: function from the queries' own self-attention keys and values to all keys and
                values that the queries may attend to; with several layers, one for each. A block
                trunk ignores it, because its queries attend to memory and to each other.
        """
        stores = self.stores(store)
        if self.memory_norm is not None:
            assert inputs.mask is not None
            stores = tuple(after(kv) for kv in inputs.memory)
            self_mask = torch.cat((inputs.mask, self_mask), dim=3)
        read, stream = self._start(embeddings, inputs)
        if self.self_attention is not None:
            stream = self.self_attention(read, positions, self_mask, stores[0], stream)
        for layer, layer_store in zip(self.further_layers, stores[1:], strict=True):
            stream = layer(stream, positions, self_mask, layer_store)
        stream = stream if self.feed_forward is None else self.feed_forward(stream)
        if self.cross_attention is None:
            return stream
        return self.cross_attention(stream, positions, inputs.memory[0], inputs.mask)

    def store_tokens(
        self,
        embeddings: Float[Tensor, "batch tokens hidden"],
        positions: Int[Tensor, "batch tokens"],
        self_mask: Bool[Tensor, "batch 1 tokens keys"],
        inputs: TrunkInputs,
        store: tuple[KVStore, ...],
    ) -> None:
        """Pass the keys and values of tokens in each layer to that layer's store."""
        assert self.self_attention is not None
        first, *others, last = store
        read, stream = self._start(embeddings, inputs)
        stream = self.self_attention(read, positions, self_mask, first, stream)
        *layers, last_layer = self.further_layers
        for layer, layer_store in zip(layers, others, strict=True):
            stream = layer(stream, positions, self_mask, layer_store)
        assert isinstance(last_layer, FurtherLayer)
        last(last_layer.kv(stream, positions))

    def stores(self, store: Stores) -> tuple[KVStore, ...]:
        """Return one store for each layer of self-attention."""
        return store if isinstance(store, tuple) else (store,) * len(self.kv_shapes)

    def _start(self, embeddings: Tensor, inputs: TrunkInputs) -> tuple[Tensor, Tensor]:
        """Return the input of self-attention and the start of the residual stream."""
        if self.trigram is not None:
            assert inputs.earlier is not None
            embeddings = self.trigram(embeddings, inputs.earlier)
        if self.feature_input is None:
            return embeddings, embeddings
        assert inputs.previous is not None
        return self.feature_input(embeddings, inputs.previous)
