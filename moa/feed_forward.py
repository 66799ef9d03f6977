"""Feed-forward network, and matrix products of rows with the experts chosen for each of them."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import silu

from moa.norm import RMSNorm

_MOST_STATIC_ROWS = 1024  # with more slots, waiting for the GPU costs less than static shapes


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
