"""Linear layers with a copy of their weights in the layout that oneDNN computes with on a CPU.

PyTorch multiplies a few tokens by a float32 weight at several times the cost of a single token, so
the verification of a small tree is slow. With weights that were reordered once, a few tokens cost
little more than one. The results differ only by rounding.
"""

from functools import cache
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from jakiro.target.sharing import sharing_copy

_DTYPES = (torch.float32, torch.bfloat16)
_ROWS = 16  # number of tokens that the layout is chosen for; any number can be multiplied


class PackedLinear(nn.Module):
    """Computes the same as a linear layer, with a reordered copy of its weight.

    The copy is made again if the weight is replaced or changed in place. All packed layers of the
    same layer share the copy.

    Args:
        layer: layer whose weight and bias are used; it is not changed.
        pack_single: whether a single token is multiplied by the copy, too.
    """

    def __init__(self, layer: nn.Linear, *, pack_single: bool = False) -> None:
        super().__init__()
        self.layer = layer
        self.pack_single = pack_single
        self._reordered = _ReorderedWeight.of(layer)

    @property
    def weight(self) -> Tensor:
        """The layer's own weight."""
        return self.layer.weight

    @property
    def bias(self) -> Tensor | None:
        """The layer's own bias."""
        return self.layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return the product with the weight, plus the bias.

        Args:
            x: input of the layer, shape [..., in_features].
        """
        if x.numel() == x.shape[-1] and not self.pack_single:
            return linear(x, self.layer.weight, self.layer.bias)
        return packed_product(x, self._reordered.current(), self.layer.bias)


class _ReorderedWeight:
    """The reordered copy of a layer's weight, made on first use."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer
        self._copy: Tensor | None = None
        self._version: tuple[object, ...] | None = None

    @classmethod
    def of(cls, layer: nn.Linear) -> "_ReorderedWeight":
        """Return the copy that is in use for a layer, or a new one."""
        known = _in_use.get(id(layer))
        if known is None:
            known = _in_use[id(layer)] = cls(layer)
        return known

    def current(self) -> Tensor:
        """Return the copy; it is made again if the weight has changed."""
        version = version_of(self.layer.weight)
        if self._copy is None or version != self._version:
            self._copy, self._version = reordered(self.layer.weight), version
        return self._copy


# By id of the layer, which cannot be reused for another layer because the value refers to it.
_in_use: WeakValueDictionary[int, _ReorderedWeight] = WeakValueDictionary()


def version_of(weight: Tensor) -> tuple[object, ...]:
    """Return a value that identifies a tensor and changes whenever the tensor is written to.

    Writing to `weight.data` is not noticed, because PyTorch does not count it.
    """
    version = 0 if weight.is_inference() else weight._version
    return weight.data_ptr(), version, weight.device, weight.dtype


def can_pack(model: nn.Module) -> bool:
    """Return whether a model's weights can be reordered on this machine.

    Each `nn.Linear` must have an ordinary float32 or bfloat16 weight on the CPU. Models with PEFT
    adapters cannot be reordered, because adapters may be switched on and off.
    """
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        return False
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    dtypes = {layer.weight.dtype for layer in layers}
    return (
        bool(layers)
        and all(_suits(layer.weight) for layer in layers)
        and all(_works(dtype) for dtype in dtypes)
    )


def packed_copy(model: nn.Module, *, pack_single: bool = False) -> nn.Module:
    """Return a copy of a model that shares all tensors, with packed layers for its linear layers.

    The model itself stays as it is, so that its own `generate`, training and saving do not change.

    Args:
        model: model, or a single linear layer.
        pack_single: whether a single token is multiplied by reordered weights, too.
    """
    return with_packed_layers(sharing_copy(model), pack_single)


def form_name(packed: bool, pack_single: bool) -> str:
    """Return a description of the weights that decoding computes with.

    Args:
        packed: whether weights are reordered.
        pack_single: whether a single token is multiplied by reordered weights, too.
    """
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
    """Replace the linear layers of a copied model with packed layers, and return the result.

    Args:
        module: copy of a model, which is changed; or a single linear layer, which is not.
        pack_single: whether a single token is multiplied by reordered weights, too.
    """
    if type(module) is nn.Linear:
        return PackedLinear(module, pack_single=pack_single)
    for name, child in module.named_children():
        setattr(module, name, with_packed_layers(child, pack_single))
    return module


def _suits(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu" and weight.dtype in _DTYPES and weight.layout == torch.strided
    )


def reordered(weight: Tensor) -> Tensor:
    """Return a copy of a weight in the layout of `packed_product`."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
    return packed


def packed_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product with a reordered weight, plus the bias.

    Args:
        x: input, shape [..., in_features].
        packed: weight from `reordered`.
        bias: shape [out_features]; None for no bias.
    """
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
