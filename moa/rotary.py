"""Rotary position embedding (arXiv 2104.09864), which pairs the two halves of each vector."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


class Rotary(nn.Module):
    """Rotates head vectors by an angle proportional to their absolute position.

    Args:
        frequencies: angle per position of each pair of channels; None to compute them from `base`.
    """

    def __init__(
        self,
        head_dim: int,
        base: float,
        frequencies: tuple[float, ...] | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.base = base
        self.given = frequencies
        self.scale = scale
        # The frequencies are neither a parameter nor a buffer, because loaders that build modules
        # on the meta device do not initialize a buffer that is missing from the checkpoint.
        self._frequencies: Tensor | None = None

    def forward(
        self,
        heads: Float[Tensor, "batch heads tokens dim"],
        positions: Int[Tensor, "#batch tokens"],
    ) -> Float[Tensor, "batch heads tokens dim"]:
        """Return the head vectors, rotated by their positions; angles are computed in float32."""
        angles = positions[:, None, :, None] * self._on(heads.device)
        cos, sin = angles.cos(), angles.sin()
        if self.scale != 1.0:
            cos, sin = cos * self.scale, sin * self.scale
        other = heads.roll(self.head_dim // 2, dims=-1)
        return torch.addcmul(heads * cos.to(heads.dtype), other, sin.to(heads.dtype))

    def _on(self, device: torch.device) -> Float[Tensor, " dim"]:
        """Return the frequency of each number, below 0 for numbers from which is subtracted."""
        if self._frequencies is None or self._frequencies.device != device:
            if self.given is not None:
                once = torch.tensor(self.given, dtype=torch.float32, device=device)
            else:
                exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device)
                once = self.base ** (-exponents / self.head_dim)
            self._frequencies = torch.cat((-once, once))
        return self._frequencies
