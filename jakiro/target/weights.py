"""Weights in other formats on a CPU: reordered for oneDNN, or in fewer bits.

PyTorch multiplies a few tokens by a float32 weight at several times the cost of a single token, so
the verification of a small tree is slow. With weights that were reordered once, a few tokens cost
little more than one, and the results differ only by rounding. Formats with fewer bits are
approximations. Drafts may be computed with them, because they cannot change the distribution of the
output.
"""

import ctypes
import mmap
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from jakiro.target.int8 import Int8Linear, can_quantize
from jakiro.utils.devices import computes_bfloat16

# own: as loaded; packed: reordered for the CPU; bfloat16: reordered copies of float32 weights, with
# 16 bits; int8: quantized to 8 bits.
WeightForm = Literal["own", "packed", "bfloat16", "int8"]
WEIGHT_FORMS: tuple[WeightForm, ...] = get_args(WeightForm)

Product = Callable[[Tensor], Tensor]
# Function from linear layers with the same input to one module, which returns the outputs of all
# layers, one after the other.
MakeProduct = Callable[[Sequence[nn.Linear]], nn.Module]
CopyT = TypeVar("CopyT")

_REORDERED_DTYPES = (torch.float32, torch.bfloat16)
_ROWS = 16  # number of tokens that the layout is chosen for; any number can be multiplied
_DONTNEED = 4  # of Linux


class PackedLinear(nn.Module):
    """A linear layer that computes with a reordered copy of a weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self._reordered = _reorder(weight)
        self._bias = bias

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the product with the weight, plus the bias, plus another tensor."""
        if residual is None:
            return _packed_product(x, self._reordered, self._bias)
        total: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, residual, self._reordered, self._bias, "add"
        )
        return total


def can_pack(model: nn.Module) -> bool:
    """Return whether each `nn.Linear` of a model can be reordered on this machine.

    Models with PEFT adapters cannot be, because adapters may be switched on and off.
    """
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    can_all = bool(layers) and all(can_reorder(layer.weight) for layer in layers)
    return can_all and not has_adapters(model)


def has_adapters(model: nn.Module) -> bool:
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
    layers = (module for module in model.modules() if type(module) is nn.Linear)
    weights = {id(layer.weight): layer.weight for layer in layers}
    return sum(weight.nbytes for weight in weights.values())


def join_weights(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    weights = [layer.weight.detach() for layer in layers]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    if all(layer.bias is None for layer in layers):
        return weight, None
    biases = [
        weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
        for layer in layers
    ]
    return weight, torch.cat(biases)


def with_products(module: nn.Module, make: MakeProduct) -> nn.Module:
    """Replace the linear layers of a copied model with copies of their weights."""
    if type(module) is nn.Linear and not is_altered(module):
        return make([module])
    for name, child in module.named_children():
        setattr(module, name, with_products(child, make))
    return module


def can_reorder(weight: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Return whether a weight can be reordered, and this machine can multiply by the copy."""
    dtype = dtype or weight.dtype
    is_ordinary = weight.device.type == "cpu" and weight.layout == torch.strided
    return is_ordinary and dtype in _REORDERED_DTYPES and _can_multiply(dtype)


@cache
def _can_multiply(dtype: torch.dtype) -> bool:
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
        product = _packed_product(x, _reorder(weight), bias)
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(product, linear(x, weight, bias), atol=0.1, rtol=0.02)


def _reorder(weight: Tensor) -> Tensor:
    reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
    return reordered


def _packed_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product


def allows_form(source: nn.Module | Tensor, form: WeightForm) -> bool:
    """Return whether this machine can compute with a layer or a matrix in a given format."""
    if form == "own":
        return True
    if isinstance(source, nn.Module) and type(source) is not nn.Linear:
        return False
    weight = source.weight if isinstance(source, nn.Linear) else source
    if type(weight) not in (Tensor, nn.Parameter):
        return False
    if form == "bfloat16":  # are such copies smaller, and as fast as they can be?
        is_larger = weight.dtype == torch.float32
        return is_larger and computes_bfloat16() and can_reorder(weight, torch.bfloat16)
    return can_reorder(weight) if form == "packed" else can_quantize(weight)


def _keep(weight: Tensor, bias: Tensor | None) -> Product:
    return partial(linear, weight=weight, bias=bias)


def _pack(weight: Tensor, bias: Tensor | None) -> Product:
    return partial(_packed_product, packed=_reorder(weight), bias=bias)


def _round(weight: Tensor, bias: Tensor | None) -> Product:
    return partial(_bfloat16_product, packed=_reorder(weight.bfloat16()), bias=bias)


def _bfloat16_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    product = _packed_product(x.bfloat16(), packed, None).to(x.dtype)
    return product if bias is None else product + bias


# By format: function from a weight and a bias to a function that multiplies by a copy of the weight
# and adds the bias. The result has the dtype of the input, or float32 with int8 weights.
CONVERT: Mapping[WeightForm, Callable[[Tensor, Tensor | None], Product]] = {
    "own": _keep,
    "packed": _pack,
    "bfloat16": _round,
    "int8": Int8Linear,
}


class WeightCopy(Generic[CopyT]):
    """A layer's weight and bias in another format; made on first use, and again after a change."""

    def __init__(self, source: nn.Module | Tensor, convert: Callable[..., CopyT]) -> None:
        self.source = source
        self._convert = convert
        self._copy: CopyT | None = None
        self._version: object = None

    @classmethod
    def shared(
        cls, source: nn.Module | Tensor, convert: Callable[..., CopyT]
    ) -> "WeightCopy[CopyT]":
        """Return the copy of the same source by the same function that is in use, or a new one."""
        copy = _in_use.get((id(source), convert))
        if copy is None:
            copy = _in_use[id(source), convert] = cls(source, convert)
        return copy

    def __deepcopy__(self, memo: dict[int, Any]) -> "WeightCopy[CopyT]":
        """Return the copy of the copied source; itself if the source is shared and not copied."""
        source = deepcopy(self.source, memo)
        return self if source is self.source else WeightCopy.shared(source, self._convert)

    def current(self) -> CopyT:
        source: Any = self.source
        tensors = [source] if isinstance(source, Tensor) else [source.weight, source.bias]
        version = [None if tensor is None else version_of(tensor) for tensor in tensors]
        if self._copy is None or version != self._version:
            self._copy, self._version = self._convert(*tensors), version
        return self._copy


# By id of the source, which cannot be reused for another one because the value refers to it.
_in_use: WeakValueDictionary[tuple[int, Callable[..., Any]], WeightCopy[Any]] = (
    WeakValueDictionary()
)


def version_of(weight: Tensor) -> tuple[object, ...]:
    """Return a value that identifies a tensor and changes whenever the tensor is written to.

    Writing to `weight.data` is not noticed, because PyTorch does not count it.
    """
    version = 0 if weight.is_inference() else weight._version
    return weight.data_ptr(), version, weight.device, weight.dtype


class MappedMemory:
    """The parts of this process' memory that show files and were not written to so far.

    Weights that transformers loads from safetensors files without conversion are such memory. There
    is none on other systems than Linux.
    """

    def __init__(self) -> None:
        try:
            smaps = Path("/proc/self/smaps").read_text(errors="replace")
        except OSError:
            smaps = ""
        self._parts: list[tuple[int, int]] = []  # first and last address
        for part in re.split(r"^(?=[0-9a-f]+-)", smaps, flags=re.MULTILINE):
            head = re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ [1-9]\d* +/", part)
            if head and all(re.search(rf"^{k}: +0 kB", part, re.M) for k in ("Anonymous", "Swap")):
                self._parts.append((int(head[1], 16), int(head[2], 16)))

    def give_back(self, tensor: Tensor) -> None:
        """Give back the pages of a tensor that shows a file; they are read again on use."""
        size = mmap.PAGESIZE
        start = -(-tensor.data_ptr() // size) * size
        end = (tensor.data_ptr() + tensor.nbytes) // size * size
        if start < end and any(low <= start and end <= high for low, high in self._parts):
            ctypes.CDLL(None).madvise(
                ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DONTNEED
            )
