"""Layer self-attention: each token attends over the target's layers (arXiv 2410.03804)."""

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from moa.rotary import Rotary


class LayerSelfAttention(nn.Module):
    """One pre-norm transformer layer whose sequence axis is the target's layer axis.

    Bidirectional, rotary over the layer index; tokens never mix.

    Args:
        width: size of one layer's state.
        num_heads: attention heads, independent of the target's own.
        head_dim: size of one head, even.
        mlp_width: inner width of the SwiGLU feed-forward part.
    """

    def __init__(self, width: int, num_heads: int, head_dim: int, mlp_width: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.query_key_value = nn.Linear(width, 3 * num_heads * head_dim, bias=False)
        self.output = nn.Linear(num_heads * head_dim, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-6)
        self.gate_up = nn.Linear(width, 2 * mlp_width, bias=False)
        self.down = nn.Linear(mlp_width, width, bias=False)
        self.rotary = Rotary(head_dim, base=10_000.0)

    def forward(
        self, state: Float[Tensor, "tokens layers width"]
    ) -> Float[Tensor, "tokens layers width"]:
        """Return `state` after the layers of each token have attended to each other."""
        state = state + self.output(self._mix(self.attention_norm(state)))
        gate, up = self.gate_up(self.mlp_norm(state)).chunk(2, dim=-1)
        return state + self.down(silu(gate) * up)

    def _mix(self, normed: Tensor) -> Tensor:
        packed = rearrange(
            self.query_key_value(normed),
            "t l (three h d) -> three t h l d",
            three=3,
            d=self.head_dim,
        )
        layers = torch.arange(normed.shape[1], device=normed.device)[None]
        queries, keys = self.rotary(packed[:2].flatten(0, 1), layers).chunk(2)
        mixed = scaled_dot_product_attention(queries, keys, packed[2])
        return rearrange(mixed, "t h l d -> t l (h d)")
