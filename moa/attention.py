"""Self-attention over tokens; cross-attention to memory of verified tokens (arXiv 2410.03804)."""

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from moa import AttentionBias
from moa.layers import RMSNorm, Rotary

MOST_GROUPED = 64  # largest number of queries that are worth a copy of their mask for every head


class KV(NamedTuple):
    """Keys (rotated by position) and values of tokens."""

    keys: Float[Tensor, "batch kv_heads tokens dim"]
    values: Float[Tensor, "batch kv_heads tokens dim"]


@runtime_checkable
class KVStore(Protocol):
    """Function from the queries' own keys and values to all keys and values they may attend to."""

    def __call__(self, kv: KV, /) -> KV: ...


# One store for each layer of self-attention, or one that keeps nothing, for all layers.
Stores = KVStore | tuple[KVStore, ...]


def no_history(kv: KV) -> KV:
    """Return `kv` unchanged, for queries that are whole sequences and attend only to each other."""
    return kv


def after(earlier: KV) -> KVStore:
    """Return a store that appends the queries' own keys and values to earlier ones."""

    def join(kv: KV) -> KV:
        pairs = zip(earlier, kv, strict=True)
        return KV(*(torch.cat((old, new), dim=2) for old, new in pairs))

    return join


@runtime_checkable
class Attend(Protocol):
    """Function from queries, keys and values to each query's weighted mean of the values.

    The mask is True where a query may attend to a key. Other engines have functions of their own
    here, which read keys and values of earlier tokens from their caches.
    """

    def __call__(self, queries: Tensor, kv: KV, mask: Tensor, /) -> Tensor: ...


def attend_masked(
    queries: Float[Tensor, "batch heads queries dim"],
    kv: KV,
    mask: Bool[Tensor, "batch 1 queries keys"],
) -> Float[Tensor, "batch heads queries dim"]:
    """Return each query's mean of the values, weighted by its attention to the keys.

    On a GPU, and in half precision on any device, kernels for heads that share keys are slow. If
    there are few queries, those of all heads that share keys are therefore processed as queries of
    a single head.

    Args:
        mask: True where a query may attend to a key.
    """
    groups = queries.shape[1] // kv.keys.shape[1]
    is_slow = queries.is_cuda or queries.dtype != torch.float32
    if groups == 1 or not is_slow or queries.shape[2] > MOST_GROUPED:
        return scaled_dot_product_attention(queries, *kv, mask, enable_gqa=True)
    grouped = queries.reshape(queries.shape[0], kv.keys.shape[1], -1, queries.shape[3])
    mixed = scaled_dot_product_attention(grouped, *kv, mask.repeat(1, 1, groups, 1))
    return mixed.reshape(queries.shape)


class CrossAttention(nn.Module):
    """Pre-norm attention whose keys and values come from memory, with a residual connection.

    Queries and keys are rotated by absolute positions, so that attention depends on the distance
    from a drafted position to each verified position. Memory is projected once per verified token,
    and the resulting keys and values are cached.
    """

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rope_theta: float,
        norm_eps: float = 1e-6,
        rotary: Rotary | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.norm = RMSNorm(hidden, eps=norm_eps)
        self.memory_norm = RMSNorm(hidden, eps=norm_eps)
        self.query = nn.Linear(hidden, num_heads * head_dim, bias=False)
        self.key_value = nn.Linear(hidden, 2 * num_kv_heads * head_dim, bias=False)
        self.output = nn.Linear(num_heads * head_dim, hidden, bias=False)
        self.rotary = rotary or Rotary(head_dim, rope_theta)
        self.attend: Attend = attend_masked
        self.kv_shapes = [(num_kv_heads, head_dim)] * 2

    def kv(
        self,
        memory: Float[Tensor, "batch tokens hidden"],
        positions: Int[Tensor, "batch tokens"],
    ) -> KV:
        """Return the keys and values of memory."""
        keys, values = self._heads(self.key_value(self.memory_norm(memory))).chunk(2, dim=1)
        return KV(self.rotary(keys, positions), values)

    def forward(
        self,
        stream: Float[Tensor, "batch queries hidden"],
        positions: Int[Tensor, "batch queries"],
        memory: KV,
        mask: Bool[Tensor, "batch 1 queries keys"],
    ) -> Float[Tensor, "batch queries hidden"]:
        """Return the residual stream after each query has attended to memory."""
        queries = self.rotary(self._heads(self.query(self.norm(stream))), positions)
        mixed = self.attend(queries, memory, mask)
        return stream + self.output(mixed.transpose(1, 2).flatten(2))

    def _heads(self, flat: Tensor) -> Tensor:
        return flat.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class SelfAttention(nn.Module):
    """Grouped-query attention with a residual connection, and by default a norm before it.

    If the input consists of token embeddings, the keys and values of a token depend only on the
    token and its position, so that the keys and values of accepted tokens can be cached.

    Args:
        has_norm: whether the input is normalized first; EAGLE (arXiv 2401.15077) has no norm here.
        bias: projections with a bias: "none", "qkv" (queries, keys and values) or "all" (these and
            the output).
        qk_norm: whether each query and key is normalized before its rotation, as in Qwen3.
        input_width: width of the input; None for `hidden`.
    """

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rope_theta: float,
        norm_eps: float = 1e-6,
        has_norm: bool = True,
        bias: AttentionBias = "none",
        qk_norm: bool = False,
        input_width: int | None = None,
        rotary: Rotary | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        # number of heads and head size: of keys, and of values
        self.kv_shapes = [(num_kv_heads, head_dim)] * 2
        width = hidden if input_width is None else input_width
        self.norm = RMSNorm(width, eps=norm_eps) if has_norm else nn.Identity()
        # One matrix for queries, keys and values, in this order.
        projected = (num_heads + 2 * num_kv_heads) * head_dim
        self.project = nn.Linear(width, projected, bias=bias != "none")
        self.output = nn.Linear(num_heads * head_dim, hidden, bias=bias == "all")
        self.query_norm = RMSNorm(head_dim, eps=norm_eps) if qk_norm else None
        self.key_norm = RMSNorm(head_dim, eps=norm_eps) if qk_norm else None
        self.rotary = rotary or Rotary(head_dim, rope_theta)
        self.attend: Attend = attend_masked

    def kv(
        self,
        embeddings: Float[Tensor, "batch tokens width"],
        positions: Int[Tensor, "batch tokens"],
    ) -> KV:
        """Return the keys and values of tokens."""
        return self.kv_of_normed(self.norm(embeddings), positions)

    def kv_of_normed(
        self, normed: Float[Tensor, "batch tokens width"], positions: Int[Tensor, "batch tokens"]
    ) -> KV:
        """Return the keys and values of tokens, or of memory, that need no norm."""
        start = self.num_heads * self.head_dim
        if hasattr(self.project, "base_layer"):  # adapters (PEFT), which `weight` does not contain
            projected = self.project(normed)[..., start:]
        else:
            weight, bias = self.project.weight[start:], self.project.bias
            projected = linear(normed, weight, None if bias is None else bias[start:])
        keys, values = self._heads(projected).chunk(2, dim=1)
        keys = keys if self.key_norm is None else self.key_norm(keys)
        return KV(self.rotary(keys, positions), values)

    def forward(
        self,
        embeddings: Float[Tensor, "batch queries width"],
        positions: Int[Tensor, "batch queries"],
        mask: Bool[Tensor, "batch 1 queries keys"],
        store: KVStore = no_history,
        residual: Float[Tensor, "batch queries hidden"] | None = None,
    ) -> Float[Tensor, "batch queries hidden"]:
        """Return the residual stream after each query has attended to earlier tokens.

        Args:
            store: function from the queries' own keys and values to all keys and values that the
                queries may attend to.
            residual: the residual stream, if it is not the input.
        """
        heads = self._heads(self.project(self.norm(embeddings)))
        rotated = self.rotary(self._normed(heads[:, : -self.num_kv_heads]), positions)
        queries, own_keys = rotated.split((self.num_heads, self.num_kv_heads), dim=1)
        kv = store(KV(own_keys, heads[:, -self.num_kv_heads :]))
        mixed = self.attend(queries, kv, mask)
        stream = embeddings if residual is None else residual
        return stream + self.output(mixed.transpose(1, 2).flatten(2))

    def _heads(self, flat: Tensor) -> Tensor:
        return flat.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _normed(self, heads: Tensor) -> Tensor:
        """Return queries followed by keys, normalized if this attention has norms for them."""
        if self.query_norm is None or self.key_norm is None:
            return heads
        queries, keys = heads.split((self.num_heads, self.num_kv_heads), dim=1)
        return torch.cat((self.query_norm(queries), self.key_norm(keys)), dim=1)
