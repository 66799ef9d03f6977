"""Feed-forward network with a gate (SwiGLU, arXiv 2002.05202), a norm and a residual connection."""

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import silu


class FeedForward(nn.Module):
    """Pre-norm SwiGLU network with a residual connection.

    Args:
        hidden: width of the residual stream.
        width: inner width.
        norm_eps: epsilon of the norm.
    """

    def __init__(self, hidden: int, width: int, norm_eps: float = 1e-6) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden, eps=norm_eps)
        self.gate_up = nn.Linear(hidden, 2 * width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(
        self, stream: Float[Tensor, "batch queries hidden"]
    ) -> Float[Tensor, "batch queries hidden"]:
        """Return the residual stream after the network has been added to it.

        Args:
            stream: the residual stream at each query.
        """
        gate, up = self.gate_up(self.norm(stream)).chunk(2, dim=-1)
        return stream + self.down(silu(gate) * up)
