"""The feature-feedback trunk: tokens beside features, which are predicted and read again."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from moa.rows import Rows, RowStore, only_these
from moa.self_attention import SelfAttention

Vectors = Float[Tensor, "batch queries hidden"]


class FeedbackTrunk(nn.Module):
    """The attention half of one decoder layer over `[embedding(x_i); f_{i-1}]`.

    EAGLE (arXiv 2401.15077, 2406.16858), EAGLE-3 (2503.01840) and published Jakiro (2502.06282)
    draft with this input. f is the target's own feature where it is known; beyond, the drafter's
    prediction is read in its place. The expert bank is the layer's feed-forward half.

        position            i - 1            i
        token                                x_i
        feature             f_{i-1}          the output here predicts f_i, the law of x_{i+1}

    Args:
        hidden: width of the residual stream (the target's hidden size).
        num_heads: query heads.
        num_kv_heads: key/value heads; divides `num_heads`.
        head_dim: size of one head, even.
        rope_base: wavelength base of the rotary embedding.
        input_norms: whether both halves of the input are normalised first, as EAGLE-3 does.
    """

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rope_base: float,
        input_norms: bool,
    ) -> None:
        super().__init__()
        self.token_norm = nn.RMSNorm(hidden, eps=1e-6) if input_norms else nn.Identity()
        self.feature_norm = nn.RMSNorm(hidden, eps=1e-6) if input_norms else nn.Identity()
        self.join = nn.Linear(2 * hidden, hidden)
        self.self_attention = SelfAttention(hidden, num_heads, num_kv_heads, head_dim, rope_base)

    def remember(
        self, memory: Float[Tensor, "batch rows hidden"], positions: Int[Tensor, "batch rows"]
    ) -> tuple[Float[Tensor, "batch 1 rows hidden"]]:
        """Return what is kept of verified tokens: their features, for the positions after them."""
        return (memory.unsqueeze(1),)

    def rows(
        self, embeddings: Vectors, previous: Vectors, positions: Int[Tensor, "batch queries"]
    ) -> Rows:
        """Return the self-attention rows of tokens; arguments as for `forward`."""
        return self.self_attention.rows(self._joined(embeddings, previous), positions)

    def forward(
        self,
        embeddings: Vectors,
        positions: Int[Tensor, "batch queries"],
        self_mask: Bool[Tensor, "batch 1 queries keys"],
        previous: Vectors,
        store: RowStore = only_these,
    ) -> Vectors:
        """Return the trunk's vector for each query.

        Args:
            embeddings: of the tokens.
            positions: where they stand.
            self_mask: True where a query may look among the rows that `store` returns.
            previous: the feature of the position before each token; zeros before the first.
            store: of self-attention rows.
        """
        return self.self_attention(self._joined(embeddings, previous), positions, self_mask, store)

    def _joined(self, embeddings: Tensor, previous: Tensor) -> Tensor:
        both = (self.token_norm(embeddings), self.feature_norm(previous))
        return self.join(torch.cat(both, dim=-1))
