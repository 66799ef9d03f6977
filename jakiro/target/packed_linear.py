"""Linear layers with a copy of their weights in the layout that oneDNN computes with on a CPU.

PyTorch multiplies a few tokens by a float32 weight at several times the cost of a single token, so
the verification of a small tree is slow. With weights that were reordered once, a few tokens cost
little more than one. The results differ only by rounding.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

# Function from linear layers with the same input to one module, which returns the outputs of all
# layers, one after the other.
MakeProduct = Callable[[Sequence[nn.Linear]], nn.Module]

_DTYPES = (torch.float32, torch.bfloat16)
_ROWS = 16  # number of tokens that the layout is chosen for; any number can be multiplied


class PackedLinear(nn.Module):
    """A linear layer that computes with a reordered copy of a weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self._reordered = reordered(weight)
        self._bias = bias

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the product with the weight, plus the bias, plus another tensor."""
        if residual is None:
            return packed_product(x, self._reordered, self._bias)
        total: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, residual, self._reordered, self._bias, "add"
        )
        return total


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


def is_altered(module: nn.Module) -> bool:
    """Return whether a module has hooks or a `forward` that its class does not have.

    Hooks with which transformers collects hidden states do not count.
    """
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    others = [hook for hook in hooks if not str(hook.__module__).startswith("transformers.")]
    return bool(others) or "forward" in vars(module)


def packed_bytes(model: nn.Module) -> int:
    """Return the number of bytes of the copies that `with_products` makes of a model's weights."""
    weights = {
        id(module.weight): module.weight for module in model.modules() if type(module) is nn.Linear
    }
    return sum(weight.numel() * weight.element_size() for weight in weights.values())


def joined_weights(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Return the weights and biases of layers with the same input, as those of one layer."""
    weights = [layer.weight.detach() for layer in layers]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    if all(layer.bias is None for layer in layers):
        return weight, None
    zeros = (layer.weight.new_zeros(layer.out_features) for layer in layers)
    pairs = zip(layers, zeros, strict=True)
    biases = [zero if layer.bias is None else layer.bias.detach() for layer, zero in pairs]
    return weight, torch.cat(biases)


def with_products(module: nn.Module, make: MakeProduct) -> nn.Module:
    """Replace the linear layers of a copied model with copies of their weights."""
    if type(module) is nn.Linear and not is_altered(module):
        return make([module])
    for name, child in module.named_children():
        setattr(module, name, with_products(child, make))
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
