"""Cross-attention from drafted positions to the memory of verified tokens (arXiv 2410.03804)."""

from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from moa.rotary import Rotary
from moa.rows import Rows


class CrossAttention(nn.Module):
    """Pre-norm attention whose keys and values come from memory, with a residual connection.

    Queries and rows are rotated by absolute positions, so the distance from a drafted position to
    the last verified one is visible. Rows are projected once per verified token and cached.

    Args:
        hidden: width of the residual stream and of memory.
        num_heads: query heads.
        num_kv_heads: key/value heads; divides `num_heads`.
        head_dim: size of one head, even.
        rope_base: wavelength base of the rotary embedding.
    """

    def __init__(
        self, hidden: int, num_heads: int, num_kv_heads: int, head_dim: int, rope_base: float
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.norm = nn.RMSNorm(hidden, eps=1e-6)
        self.memory_norm = nn.RMSNorm(hidden, eps=1e-6)
        self.query = nn.Linear(hidden, num_heads * head_dim, bias=False)
        self.key_value = nn.Linear(hidden, 2 * num_kv_heads * head_dim, bias=False)
        self.output = nn.Linear(num_heads * head_dim, hidden, bias=False)
        self.rotary = Rotary(head_dim, rope_base)

    def rows(
        self,
        memory: Float[Tensor, "batch rows hidden"],
        positions: Int[Tensor, "batch rows"],
    ) -> Rows:
        """Return keys and values of `memory` of the verified tokens at `positions`."""
        keys, values = self._heads(self.key_value(self.memory_norm(memory))).chunk(2, dim=1)
        return Rows(self.rotary(keys, positions), values)

    def forward(
        self,
        stream: Float[Tensor, "batch queries hidden"],
        positions: Int[Tensor, "batch queries"],
        rows: Rows,
        mask: Bool[Tensor, "batch 1 queries keys"],
    ) -> Float[Tensor, "batch queries hidden"]:
        """Let each position attend to the memory rows that `mask` allows (True: may see)."""
        queries = self.rotary(self._heads(self.query(self.norm(stream))), positions)
        mixed = scaled_dot_product_attention(queries, *rows, mask, enable_gqa=True)
        return stream + self.output(rearrange(mixed, "b h q d -> b q (h d)"))

    def _heads(self, flat: Tensor) -> Tensor:
        return rearrange(flat, "b q (h d) -> b h q d", d=self.head_dim)
