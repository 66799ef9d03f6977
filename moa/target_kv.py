"""Keys and values of a target's layers, computed again from the inputs of these layers."""

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from moa.layers import Rotary


class TargetKV(nn.Module):
    """Computes keys and values of several layers of a target with copies of the layers' weights.

    The layers must be like those of Llama: an RMSNorm, projections without biases, and a rotary
    embedding that pairs the halves of each key. Other engines need this, because they give a
    drafter the target's hidden states, but not its keys and values.

    Args:
        width: width of all keys of a layer, which is also that of all values.
    """

    def __init__(
        self, num_layers: int, hidden: int, width: int, norm_eps: float, rotary: Rotary
    ) -> None:
        super().__init__()
        self.eps = norm_eps
        self.norm = nn.Parameter(torch.ones(num_layers, hidden))
        self.weight = nn.Parameter(torch.zeros(num_layers, 2 * width, hidden))
        self.rotary = rotary

    def forward(
        self, inputs: Float[Tensor, "tokens layers hidden"]
    ) -> Float[Tensor, "tokens layers twice_width"]:
        """Return the keys before their rotation, and the values, side by side."""
        normed = rms_norm(inputs, inputs.shape[-1:], eps=self.eps) * self.norm
        return torch.einsum("tlh,lwh->tlw", normed, self.weight)

    def rotated(
        self,
        unrotated: Float[Tensor, "tokens layers twice_width"],
        positions: Int[Tensor, " tokens"],
    ) -> Float[Tensor, "tokens layers twice_width"]:
        """Return keys and values as the target caches them."""
        return with_rotated_keys(unrotated[None], positions[None], self.rotary)[0]


def with_rotated_keys(
    state: Float[Tensor, "batch tokens layers twice_width"],
    positions: Int[Tensor, "batch tokens"],
    rotary: Rotary,
) -> Float[Tensor, "batch tokens layers twice_width"]:
    """Return keys and values whose keys are rotated (further) by their positions.

    Args:
        state: keys of all heads and values of all heads, side by side.
        positions: absolute positions of the tokens; negated to undo a rotation.
    """
    keys, values = state.chunk(2, dim=-1)
    heads = rearrange(keys, "b t l (h d) -> b (l h) t d", d=rotary.head_dim)
    turned = rotary(heads, positions)
    back = rearrange(turned, "b (l h) t d -> b t l (h d)", l=state.shape[2])
    return torch.cat((back, values), dim=-1)
