"""RMS norm (arXiv 1910.07467), with few operators on a CPU."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """An RMS norm whose result differs from that of torch only by rounding."""

    eps: float

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of each vector."""
        if x.device.type != "cpu" or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().forward(x)
        return rms_norm_on_cpu(x, None, self.eps) * self.weight


def rms_norm_on_cpu(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return an RMS norm, for which torch has seven operators on a CPU, and these are three.

    The mean of numbers and their negatives is 0, so their layer norm is the RMS norm of each half.

    Args:
        weight: weight of the norm, twice; None for no weight.
    """
    size = x.shape[-1]
    both = torch.cat((x, -x), dim=-1)
    return torch.layer_norm(both, (2 * size,), weight, None, eps).narrow(-1, 0, size)
