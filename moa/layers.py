"""The layers that attention modules share: RMS norm, rotary embedding and feed-forward network."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

_MOST_STATIC_ROWS = 1024  # with more slots, waiting for the GPU costs less than static shapes


class RMSNorm(nn.RMSNorm):
    """An RMS norm (arXiv 1910.07467) whose result differs from that of torch only by rounding."""

    eps: float

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of each vector."""
        if _has_fast_norm(x):
            return super().forward(x.to(self.weight.dtype))  # under autocast, they differ
        return rms_norm_on_cpu(x, None, self.eps) * self.weight


def unit_norm(x: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of each vector, without a weight."""
    if _has_fast_norm(x):
        return rms_norm(x, x.shape[-1:], eps=eps)
    return rms_norm_on_cpu(x, None, eps)


def _has_fast_norm(x: Tensor) -> bool:
    return x.device.type != "cpu" or torch.is_grad_enabled() or torch.compiler.is_compiling()


def rms_norm_on_cpu(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return an RMS norm, for which torch has seven operators on a CPU, and these are three.

    The mean of numbers and their negatives is 0, so their layer norm is the RMS norm of each half.

    Args:
        weight: weight of the norm, twice; None for no weight.
    """
    size = x.shape[-1]
    both = torch.cat((x, -x), dim=-1)
    return torch.layer_norm(both, (2 * size,), weight, None, eps).narrow(-1, 0, size)


class Rotary(nn.Module):
    """Rotates head vectors by an angle proportional to their absolute position (arXiv 2104.09864).

    The two halves of each vector are paired.

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


class FeedForward(nn.Module):
    """Pre-norm SwiGLU network with a residual connection."""

    def __init__(self, hidden: int, width: int, norm_eps: float = 1e-6) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden, eps=norm_eps)
        self.gate_up = nn.Linear(hidden, 2 * width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(
        self, stream: Float[Tensor, "batch queries hidden"]
    ) -> Float[Tensor, "batch queries hidden"]:
        """Return the residual stream after the network has been added to it."""
        gate, up = self.gate_up(self.norm(stream)).chunk(2, dim=-1)
        return stream + self.down(silu(gate) * up)


class ExpertSlots:
    """Pairs (slots) of a row and one of the experts that are active for it.

    There are three ways to multiply, with equal results up to rounding:

    - "grouped": the slots of one expert are multiplied together, so that the matrix of an active
      expert is read once, in place, and those of other experts are not read. The shapes depend on
      the chosen experts.
    - "gathered": the matrix of each slot's expert is copied (for few slots).
    - "all": all experts are multiplied with all rows, and the chosen product is selected.

    Captured and compiled passes need shapes that do not depend on the chosen experts, which only
    "gathered" and "all" have.

    Args:
        way: one of the three ways; None to choose the fastest one that is possible.
    """

    def __init__(
        self, expert_ids: Int[Tensor, " slots"], num_experts: int, way: str | None = None
    ) -> None:
        self.expert_ids = expert_ids
        self.num_experts = num_experts
        self.way = way or self._fastest_way()
        if self.way == "grouped":
            self._order, self._back, self._counts = self._sorted()

    def multiply(
        self, rows: Float[Tensor, "slots inner"], stack: Float[Tensor, "experts inner outer"]
    ) -> Float[Tensor, "slots outer"]:
        """Return the product of each row with the matrix of its expert."""
        if self.way == "gathered":
            return torch.bmm(rows.unsqueeze(1), stack[self.expert_ids]).squeeze(1)
        if self.way == "all":
            every = torch.einsum("si,eio->seo", rows, stack)
            index = self.expert_ids[:, None, None].expand(-1, 1, stack.shape[2])
            return every.gather(1, index).squeeze(1)
        # `unbind`, because the gradients of separate slices would each be as large as the stack.
        groups = zip(rows[self._order].split(self._counts), stack.unbind(), strict=True)
        products = [group @ matrix for group, matrix in groups if len(group)]
        return torch.cat(products or [rows.new_zeros((0, stack.shape[2]))])[self._back]

    def _fastest_way(self) -> str:
        slots = len(self.expert_ids)
        is_static = self.expert_ids.is_cuda and slots <= _MOST_STATIC_ROWS
        if not (is_static or torch.compiler.is_compiling()):
            return "grouped"
        return "gathered" if slots <= self.num_experts else "all"

    def _sorted(self) -> tuple[Tensor, Tensor, list[int]]:
        """Return the order by experts, its inverse, and the number of slots of each expert.

        On the meta device, where values are unknown, all experts have about equally many slots.
        """
        order = self.expert_ids.argsort(stable=True)
        if self.expert_ids.is_meta:
            share, rest = divmod(len(order), self.num_experts)
            counts = [share + (expert < rest) for expert in range(self.num_experts)]
        else:
            counts = self.expert_ids.bincount(minlength=self.num_experts).tolist()
        return order, order.argsort(), counts
