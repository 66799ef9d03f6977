"""Memory: one vector per verified token, made from the target's layers (arXiv 2410.03804)."""

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from moa import FusionNorm
from moa.layers import RMSNorm, Rotary, unit_norm


class LayerSelfAttention(nn.Module):
    """One pre-norm transformer layer whose sequence axis is the target's layer axis, and its mean.

    Attention is bidirectional, with a rotary embedding of the layer index. The layers of one token
    attend to each other, never to the layers of another token.

    Args:
        num_heads: number of attention heads, independent of the target's number of heads.
        rotary: rotary embedding of the layer index; None for one with base 10000.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        head_dim: int,
        mlp_width: int,
        norm_eps: float = 1e-6,
        rotary: Rotary | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.attention_norm = RMSNorm(width, eps=norm_eps)
        self.query_key_value = nn.Linear(width, 3 * num_heads * head_dim, bias=False)
        self.output = nn.Linear(num_heads * head_dim, width, bias=False)
        self.mlp_norm = RMSNorm(width, eps=norm_eps)
        self.gate_up = nn.Linear(width, 2 * mlp_width, bias=False)
        self.down = nn.Linear(mlp_width, width, bias=False)
        self.rotary = rotary or Rotary(head_dim, base=10_000.0)

    def forward(self, state: Float[Tensor, "tokens layers width"]) -> Float[Tensor, "tokens width"]:
        """Return each token's mean over layers after its layers have attended to each other."""
        state = state + self.output(self._mix(self.attention_norm(state)))
        gate, up = self.gate_up(self.mlp_norm(state)).chunk(2, dim=-1)
        # The last matrix is linear, so the mean of its products is its product with the mean.
        return state.mean(dim=1) + self.down((silu(gate) * up).mean(dim=1))

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


class LayerProjection(nn.Module):
    """Projects every layer's state to a common width, with a separate matrix for each layer."""

    def __init__(
        self, num_layers: int, width: int, common_width: int, norm_eps: float = 1e-6
    ) -> None:
        super().__init__()
        self.norm = RMSNorm(width, eps=norm_eps)
        self.weight = nn.Parameter(torch.randn(num_layers, width, common_width) * width**-0.5)

    def forward(
        self, state: Float[Tensor, "batch tokens layers width"]
    ) -> Float[Tensor, "batch tokens layers common"]:
        """Return each layer's state, normalized and projected by that layer's matrix."""
        return torch.einsum("btlw,lwc->btlc", self.norm(state), self.weight)


class StateNorm(nn.Module):
    """Normalizes hidden states of several layers before they are fused.

    Args:
        is_joint: whether all states of a token are normalized together, instead of each alone.
    """

    def __init__(self, num_layers: int, width: int, is_joint: bool, norm_eps: float) -> None:
        super().__init__()
        self.shape = (num_layers, width) if is_joint else (width,)
        self.eps = norm_eps
        self.weight = nn.Parameter(torch.ones(num_layers, width))

    def forward(
        self, state: Float[Tensor, "batch tokens layers width"]
    ) -> Float[Tensor, "batch tokens layers width"]:
        """Return the normalized states, each channel of each layer with its own gain."""
        return rms_norm(state, self.shape, eps=self.eps) * self.weight


class LayerMixture(nn.Module):
    """One memory for each layer of the drafter: a mixture of the target's normalized states.

    The weights of a layer are a softmax over the states (DFlare, a mixture for each layer of a
    block drafter), so a layer can read the state that the target's layer in its place reads.

    Args:
        num_readers: number of the drafter's layers.
    """

    def __init__(self, num_layers: int, num_readers: int, norm_eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = norm_eps
        self.mixture = nn.Parameter(torch.zeros(num_readers, num_layers))

    def forward(
        self, state: Float[Tensor, "batch tokens layers width"]
    ) -> Float[Tensor, "batch tokens readers width"]:
        """Return the memory of each layer of the drafter."""
        return self.mixture.softmax(dim=-1) @ unit_norm(state, self.eps)


class MemoryEncoder(nn.Module):
    """Computes memory: layer self-attention, mean over layers, projection to the drafter's width.

    Without layer self-attention, the layers' states are concatenated and projected together. If the
    concatenation is already as wide as memory, it is used unchanged, unless `common_width` or
    `always_project` is set.

    Args:
        width: size of one layer's raw state (keys and values of all KV heads, or a hidden state).
        common_width: width to which each layer's state is projected first; None to skip this
            projection.
        always_project: whether to project the concatenated states even if they are already as wide
            as memory; has no effect with layer self-attention, whose output is always projected.
        state_norm: norm of the states before anything else: "none", "each" (each layer alone, as in
            EAGLE-3.1) or "all" (all layers together).
        rope_frequencies: angles of this embedding, as for `Rotary`; None to compute them from the
            base.
    """

    def __init__(
        self,
        num_layers: int,
        width: int,
        hidden: int,
        num_heads: int,
        head_dim: int,
        mlp_width: int,
        common_width: int | None = None,
        layer_attention: bool = True,
        always_project: bool = False,
        norm_eps: float = 1e-6,
        output_bias: bool = True,
        state_norm: FusionNorm = "none",
        rope_theta: float = 10_000.0,
        rope_frequencies: tuple[float, ...] | None = None,
        rope_scale: float = 1.0,
    ) -> None:
        super().__init__()
        rotary = Rotary(head_dim, rope_theta, rope_frequencies, rope_scale)
        self.state_norm = (
            None
            if state_norm == "none"
            else StateNorm(num_layers, width, state_norm == "all", norm_eps)
        )
        inner = width if common_width is None else common_width
        self.project_layers: nn.Module = (
            nn.Identity()
            if common_width is None
            else LayerProjection(num_layers, width, common_width, norm_eps)
        )
        self.layer_attention = (
            LayerSelfAttention(inner, num_heads, head_dim, mlp_width, norm_eps, rotary)
            if layer_attention
            else None
        )
        total = inner if layer_attention else num_layers * inner
        is_memory = not (layer_attention or common_width or always_project) and total == hidden
        self.output = nn.Identity() if is_memory else nn.Linear(total, hidden, output_bias)

    def forward(
        self, state: Float[Tensor, "batch tokens layers width"]
    ) -> Float[Tensor, "batch tokens hidden"]:
        """Return one memory vector per token; no token influences another token's vector."""
        normed = state if self.state_norm is None else self.state_norm(state)
        projected = self.project_layers(normed)
        tokens = rearrange(projected, "b t l w -> (b t) l w")
        if self.layer_attention is None:
            joined = tokens.flatten(start_dim=1)
        else:
            joined = self.layer_attention(tokens)
        return rearrange(self.output(joined), "(b t) h -> b t h", b=state.shape[0])
