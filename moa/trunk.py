"""The Mixture-of-Attentions trunk: self-attention over tokens, then cross-attention to memory."""

from typing import NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from moa.cross_attention import CrossAttention
from moa.rows import Rows, RowStore, only_these
from moa.self_attention import SelfAttention


class MemoryView(NamedTuple):
    """Memory of verified tokens, and which of it each query may see."""

    rows: Rows
    mask: Bool[Tensor, "batch 1 queries memory"]


class MoaTrunk(nn.Module):
    """Turns token embeddings and target memory into one vector per position (arXiv 2410.03804).

    No feature of the drafter is ever fed back, so drafting any number of steps drifts in tokens
    only. The output at position i is meant to predict the target's feature at i, from tokens up to
    i and from memory of verified positions.

    Args:
        hidden: width of the residual stream (the target's hidden size).
        num_heads: query heads of both attentions.
        num_kv_heads: key/value heads of both attentions.
        head_dim: size of one head, even.
        rope_base: wavelength base of the rotary embedding.
    """

    def __init__(
        self, hidden: int, num_heads: int, num_kv_heads: int, head_dim: int, rope_base: float
    ) -> None:
        super().__init__()
        geometry = (hidden, num_heads, num_kv_heads, head_dim, rope_base)
        self.self_attention = SelfAttention(*geometry)
        self.cross_attention = CrossAttention(*geometry)

    def remember(
        self, memory: Float[Tensor, "batch rows hidden"], positions: Int[Tensor, "batch rows"]
    ) -> Rows:
        """Return what is kept of verified tokens: the rows that cross-attention reads."""
        return self.cross_attention.rows(memory, positions)

    def forward(
        self,
        embeddings: Float[Tensor, "batch queries hidden"],
        positions: Int[Tensor, "batch queries"],
        self_mask: Bool[Tensor, "batch 1 queries keys"],
        memory: MemoryView,
        store: RowStore = only_these,
    ) -> Float[Tensor, "batch queries hidden"]:
        """Return the trunk's vector for each query; masks are True where a query may look."""
        stream = self.self_attention(embeddings, positions, self_mask, store)
        return self.cross_attention(stream, positions, memory.rows, memory.mask)
