"""Linear layers whose products are those of single rows, bit for bit.

Kernels may add the products of a single row in another order than those of several rows. In
bfloat16, oneDNN does so for more than 1,024 inputs (seen with torch 2.13 and AVX-512).
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

ROWS = (16, 2, 3, 5, 8, 17, 33, 64)  # numbers of rows that products are compared for


class RowByRow(nn.Module):
    """Computes the same as a linear layer, one row after the other.

    Args:
        layer: layer whose weight and bias are used; it is not changed.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    @property
    def weight(self) -> Tensor:
        """The layer's own weight."""
        return self.layer.weight

    @property
    def bias(self) -> Tensor | None:
        """The layer's own bias."""
        return self.layer.bias

    def forward(self, x: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        """Return the product with the weight, plus the bias."""
        if not x.numel():
            return linear(x, self.weight, self.bias)
        rows = [linear(row, self.weight, self.bias) for row in x.reshape(-1, 1, 1, x.shape[-1])]
        return torch.cat(rows).reshape(*x.shape[:-1], -1)


def with_single_rows(module: nn.Module) -> nn.Module:
    """Replace the linear layers of a copied model whose products depend on the number of rows.

    Layers of the same shape are compared once, with random inputs: this is a test on examples, not
    a proof.

    Args:
        module: copy of a model, which is changed; or a single linear layer, which is not.
    """
    return _with_single_rows(module, {})


def _with_single_rows(module: nn.Module, known: dict[object, bool]) -> nn.Module:
    if type(module) is nn.Linear:
        kind = (tuple(module.weight.shape), module.weight.dtype, module.bias is None)
        if kind not in known:
            known[kind] = depends_on_rows(module)
        return RowByRow(module) if known[kind] else module
    for name, child in module.named_children():
        setattr(module, name, _with_single_rows(child, known))
    return module


@torch.no_grad()
def depends_on_rows(layer: nn.Linear) -> bool:
    """Return whether the products of several rows differ from those of single rows.

    Args:
        layer: linear layer.
    """
    single, random = RowByRow(layer), torch.Generator().manual_seed(0)
    for count in ROWS:
        rows = torch.randn(1, count, layer.in_features, generator=random).to(layer.weight.dtype)
        if not torch.equal(layer(rows), single(rows)):
            return True
    return False
