"""Attention of a drafter over the keys and values in vLLM's cache.

vLLM appends the keys and values of each step to its cache and lets each query attend to the tokens
of its request up to its own row. The batch of `moa` has size 1 here, and its tokens are those of
all requests. Both classes replace `moa.attention.attend_masked`.
"""

import torch
from einops import rearrange
from torch import Tensor, nn

from moa.attention import KV, Attend


class CachedAttend(nn.Module):
    """Attention to all tokens of a request so far.

    Args:
        attention: vLLM's attention, a function of queries, keys and values [tokens, heads * dim].
    """

    def __init__(self, attention: nn.Module, head_dim: int) -> None:
        super().__init__()
        self.attention = attention
        self.head_dim = head_dim

    def forward(self, queries: Tensor, kv: KV, mask: Tensor) -> Tensor:
        """Return the values that each query has mixed.

        Args:
            queries: rotated queries [1, heads, tokens, dim].
            kv: keys and values of the same tokens [1, kv_heads, tokens, dim], which are cached.
            mask: has no effect, because vLLM knows which tokens a query attends to.
        """
        rows = (rearrange(heads, "1 h t d -> t (h d)").contiguous() for heads in (queries, *kv))
        return rearrange(self.attention(*rows), "t (h d) -> 1 h t d", d=self.head_dim)


class VerifiedAttend(nn.Module):
    """Cross-attention to the memory of the verified tokens among those in the cache.

    vLLM stores a row for each drafted token, too, although drafted tokens have no memory. The
    values of these rows are zero, so that a row adds to the sum of the weights, but not to the
    mixed values. A second attention with the same queries and keys, and values of one for verified
    tokens only, gives the share of the weights that verified tokens have; division by it leaves out
    the other rows exactly.

    The caller passes the key of the last verified token for each drafted token after it. With n
    drafted tokens, the share is therefore at least 1 / (n + 1), and the division loses no precision
    in 16 bits.

    Args:
        share: attention of the same shape with a cache of its own.
    """

    def __init__(self, mix: Attend, share: Attend) -> None:
        super().__init__()
        self.mix, self.share = mix, share

    def forward(self, queries: Tensor, kv: KV, mask: Tensor) -> Tensor:
        """Return the values that each query has mixed.

        Args:
            kv: keys and values of the memory of the same tokens [1, kv_heads, tokens, dim]; of a
                drafted token, those of the last verified token.
            mask: True where the token is verified [1, 1, 1, tokens].
        """
        unknown = ~mask.transpose(-1, -2)
        values = kv.values.masked_fill(unknown, 0)
        ones = torch.ones_like(values).masked_fill(unknown, 0)
        share = self.share(queries, KV(kv.keys, ones), mask)
        # Only rows that stand for no token see no verified one.
        smallest = torch.finfo(share.dtype).tiny
        return self.mix(queries, KV(kv.keys, values), mask) / share.clamp(min=smallest)
