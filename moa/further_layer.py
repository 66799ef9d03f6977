"""A layer of the trunk after the first one, as in drafters with two layers (arXiv 2503.10135)."""

from functools import partial

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from moa.attention import KV, KVStore, SelfAttention
from moa.feed_forward import FeedForward


class FurtherLayer(nn.Module):
    """The feed-forward network of the layer before, and self-attention.

    The experts, which follow the trunk, are the feed-forward network of the last layer.

    Args:
        hidden: width of the residual stream.
        width: inner width of the feed-forward network.
        norm_eps: epsilon of the norms.
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
        """Return the keys and values of tokens.

        Args:
            stream: the residual stream after the attention of the layer before.
            positions: absolute positions of the tokens.
        """
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
            stream: the residual stream after the attention of the layer before.
            positions: absolute positions of the queries.
            mask: True where a query may attend to a key that `store` returns.
            store: function from the queries' own keys and values to all keys and values.
        """
        attended: Tensor = self.self_attention(self.feed_forward(stream), positions, mask, store)
        return attended
