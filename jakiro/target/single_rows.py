"""Linear layers whose products are those of single rows, bit for bit.

Kernels may add the products of a single row in another order than those of several rows. In
bfloat16, oneDNN does so for more than 1,024 inputs (seen with torch 2.13 and AVX-512).
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

from jakiro.target.wrapped_linear import WrappedLinear

ROWS = (16, 2, 3, 5, 8, 17, 33, 64)  # numbers of rows that products are compared for


class RowGroups(WrappedLinear):
    """Computes the same as a linear layer, with at most a given number of rows at a time.

    Args:
        layer: layer whose weight and bias are used; it is not changed.
        size: largest number of rows that are multiplied together.
    """

    def __init__(self, layer: nn.Linear, size: int) -> None:
        super().__init__(layer)
        self.size = size

    def forward(self, x: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        """Return the product with the weight, plus the bias."""
        rows = x.reshape(1, -1, x.shape[-1])
        if rows.shape[1] <= self.size:
            return linear(x, self.weight, self.bias)
        groups = [linear(own, self.weight, self.bias) for own in rows.split(self.size, dim=1)]
        return torch.cat(groups, dim=1).reshape(*x.shape[:-1], -1)


def with_row_groups(module: nn.Module, sizes: dict[object, int]) -> nn.Module:
    """Replace the linear layers of a copied model by layers with the products of single rows.

    Layers of the same shape are compared once, with random inputs: this is a test on examples, not
    a proof.

    Args:
        module: copy of a model, which is changed; or a single linear layer, which is not.
        sizes: known sizes of groups by the kind of layer, to which new ones are added.
    """
    if type(module) is nn.Linear:
        kind = (tuple(module.weight.shape), module.weight.dtype, module.bias is None)
        if kind not in sizes:
            sizes[kind] = 1 if depends_on_rows(module) else max(ROWS)
        return RowGroups(module, sizes[kind])
    for name, child in module.named_children():
        setattr(module, name, with_row_groups(child, sizes))
    return module


@torch.no_grad()
def depends_on_rows(layer: nn.Linear) -> bool:
    """Return whether the products of several rows differ from those of single rows.

    Args:
        layer: linear layer.
    """
    single, random = RowGroups(layer, 1), torch.Generator().manual_seed(0)
    for count in ROWS:
        rows = torch.randn(1, count, layer.in_features, generator=random).to(layer.weight.dtype)
        if not torch.equal(layer(rows), single(rows)):
            return True
    return False
