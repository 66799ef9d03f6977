"""From the target's per-layer state to one memory vector per verified token (arXiv 2410.03804)."""

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from moa.layer_attention import LayerSelfAttention


class LayerProjection(nn.Module):
    """Brings every layer's state to a common width with a matrix of its own.

    Args:
        num_layers: how many target layers are read.
        width: size of one layer's raw state.
        common_width: size after the projection.
    """

    def __init__(self, num_layers: int, width: int, common_width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.weight = nn.Parameter(torch.randn(num_layers, width, common_width) * width**-0.5)

    def forward(
        self, state: Float[Tensor, "batch tokens layers width"]
    ) -> Float[Tensor, "batch tokens layers common"]:
        """Return each layer's state through that layer's own matrix."""
        return torch.einsum("btlw,lwc->btlc", self.norm(state), self.weight)


class MemoryEncoder(nn.Module):
    """Layer self-attention, mean over layers, and a projection to the drafter's width.

    Without layer self-attention the layers' states are projected side by side; a single state that
    is as wide as memory is memory as it is.

    Args:
        num_layers: how many states of the target are read.
        width: size of one layer's raw state (keys and values of all KV heads, or a hidden state).
        hidden: width of the memory that cross-attention reads.
        num_heads: heads of the layer self-attention.
        head_dim: size of one of its heads.
        mlp_width: inner width of its feed-forward part.
        common_width: if given, each layer is first projected to this width.
        layer_attention: whether layers attend to each other.
        always_project: project even a single state that is as wide as memory.
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
    ) -> None:
        super().__init__()
        inner = width if common_width is None else common_width
        self.project_layers: nn.Module = (
            nn.Identity()
            if common_width is None
            else LayerProjection(num_layers, width, common_width)
        )
        self.layer_attention = (
            LayerSelfAttention(inner, num_heads, head_dim, mlp_width) if layer_attention else None
        )
        total = inner if layer_attention else num_layers * inner
        is_memory = not (layer_attention or common_width or always_project) and total == hidden
        self.output = nn.Identity() if is_memory else nn.Linear(total, hidden)

    def forward(
        self, state: Float[Tensor, "batch tokens layers width"]
    ) -> Float[Tensor, "batch tokens hidden"]:
        """Return one memory vector per token; tokens do not influence each other."""
        projected = self.project_layers(state)
        tokens = rearrange(projected, "b t l w -> (b t) l w")
        if self.layer_attention is None:
            joined = tokens.flatten(start_dim=1)
        else:
            joined = self.layer_attention(tokens).mean(dim=1)
        return rearrange(self.output(joined), "(b t) h -> b t h", b=state.shape[0])
