"""Linear layers with a copy of their weights in the layout that oneDNN computes with on a CPU.

PyTorch multiplies a few tokens by a float32 weight at several times the cost of a single token, so
the verification of a small tree is slow. With weights that were reordered once, a few tokens cost
little more than one. The results differ only by rounding.
"""

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from jakiro.target.sharing import sharing_copy
from jakiro.target.weight_copies import WeightCopy
from jakiro.target.wrapped_linear import WrappedLinear

_DTYPES = (torch.float32, torch.bfloat16)
_ROWS = 16  # number of tokens that the layout is chosen for; any number can be multiplied


class PackedLinear(WrappedLinear):
    """Computes the same as a linear layer, with a reordered copy of its weight.

    The copy is made again if the weight is replaced or changed in place. All packed layers of the
    same layer share the copy.

    Args:
        pack_single: whether a single token is multiplied by the copy, too.
    """

    def __init__(self, layer: nn.Linear, *, pack_single: bool = False) -> None:
        super().__init__(layer)
        self.pack_single = pack_single
        self._reordered = WeightCopy.shared(layer, _reordered_of_layer)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product with the weight, plus the bias."""
        if x.numel() == x.shape[-1] and not self.pack_single:
            return linear(x, self.layer.weight, self.layer.bias)
        return packed_product(x, self._reordered.current(), self.layer.bias)


def can_pack(model: nn.Module) -> bool:
    """Return whether a model's weights can be reordered on this machine.

    Each `nn.Linear` must have an ordinary float32 or bfloat16 weight on the CPU. Models with PEFT
    adapters cannot be reordered, because adapters may be switched on and off.
    """
    if has_adapters(model):
        return False
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    return bool(layers) and all(can_reorder(layer.weight) for layer in layers)


def has_adapters(model: nn.Module) -> bool:
    """Return whether a model has PEFT adapters, which may be switched on and off."""
    return any(type(module).__module__.startswith("peft.") for module in model.modules())


def packed_copy(model: nn.Module, *, pack_single: bool = False) -> nn.Module:
    """Return a copy of a model that shares all tensors, with packed layers for its linear layers.

    The model itself stays as it is, so that its own `generate`, training and saving do not change.
    """
    return with_packed_layers(sharing_copy(model), pack_single)


def form_name(packed: bool, pack_single: bool) -> str:
    """Return a description of the weights that decoding computes with."""
    if not packed:
        return "own weights"
    return "reordered weights" if pack_single else "reordered weights for trees"


def packed_bytes(model: nn.Module) -> int:
    """Return the number of bytes of the copies that `packed_copy` makes of a model's weights."""
    weights = {
        id(module.weight): module.weight for module in model.modules() if type(module) is nn.Linear
    }
    return sum(weight.numel() * weight.element_size() for weight in weights.values())


def with_packed_layers(module: nn.Module, pack_single: bool) -> nn.Module:
    """Replace the linear layers of a copied model with packed layers, and return the result."""
    if type(module) is nn.Linear:
        return PackedLinear(module, pack_single=pack_single)
    for name, child in module.named_children():
        setattr(module, name, with_packed_layers(child, pack_single))
    return module


def can_reorder(weight: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Return whether a weight can be reordered, and this machine can multiply by the copy.

    Only float32 and bfloat16 weights on the CPU can be reordered.

    Args:
        dtype: dtype of the copy; None for that of the weight.
    """
    dtype = dtype or weight.dtype
    return (
        weight.device.type == "cpu"
        and weight.layout == torch.strided
        and dtype in _DTYPES
        and _works(dtype)
    )


def reordered(weight: Tensor) -> Tensor:
    """Return a copy of a weight in the layout of `packed_product`."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
    return packed


def _reordered_of_layer(weight: Tensor, _bias: Tensor | None) -> Tensor:
    return reordered(weight)


def packed_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product with a reordered weight, plus the bias."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product


@cache
def _works(dtype: torch.dtype) -> bool:
    """Return whether torch's operators for reordered weights exist and give correct products.

    The operators are not public. In bfloat16, they need a processor that supports bfloat16.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    random = torch.Generator().manual_seed(0)
    weight, x, bias = (
        torch.randn(*shape, generator=random).to(dtype) for shape in ((48, 32), (3, 5, 32), (48,))
    )
    try:
        product = packed_product(x, reordered(weight), bias)
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(product, linear(x, weight, bias), atol=0.1, rtol=0.02)
