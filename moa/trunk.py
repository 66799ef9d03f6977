"""The Mixture-of-Attentions trunk: self-attention over tokens, then cross-attention to memory."""

from typing import NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from moa.anchor_reader import AnchorReader
from moa.cross_attention import CrossAttention
from moa.rows import Rows, RowStore, only_these
from moa.self_attention import SelfAttention


class MemoryView(NamedTuple):
    """Memory of verified tokens, and which of it each query may see.

    For a trunk that reads anchors also the memory of each query's anchor and the way to it.
    """

    rows: Rows
    mask: Bool[Tensor, "batch 1 queries memory"]
    anchor: Float[Tensor, "batch queries hidden"] | None = None
    distance: Int[Tensor, "#batch queries"] | None = None


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
        reads_anchor: whether every query is also told the memory of its anchor directly.
    """

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rope_base: float,
        reads_anchor: bool = False,
    ) -> None:
        super().__init__()
        geometry = (hidden, num_heads, num_kv_heads, head_dim, rope_base)
        self.self_attention = SelfAttention(*geometry)
        self.anchor_reader = AnchorReader(hidden) if reads_anchor else None
        self.cross_attention = CrossAttention(*geometry)

    def remember(
        self, memory: Float[Tensor, "batch rows hidden"], positions: Int[Tensor, "batch rows"]
    ) -> tuple[Float[Tensor, "batch _ rows _"], ...]:
        """Return what is kept of verified tokens.

        These are the keys and values that cross-attention reads, and for a trunk that reads anchors
        memory itself.
        """
        rows = self.cross_attention.rows(memory, positions)
        return rows if self.anchor_reader is None else (*rows, memory.unsqueeze(1))

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
        if self.anchor_reader is not None:
            stream = self.anchor_reader(stream, memory.anchor, memory.distance)
        return self.cross_attention(stream, positions, memory.rows, memory.mask)
