"""Formats of weights on a CPU, and products with weights in these formats.

Products in formats other than "own" have other rounding, or are approximations. Drafts may be
computed with them, because they cannot change the distribution of the output.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from jakiro.target.int8_linear import Int8Linear, can_quantize
from jakiro.target.packed_linear import can_reorder, packed_product, reordered
from jakiro.utils.processor import computes_bfloat16

# own: as loaded; packed: reordered for the CPU; bfloat16: reordered copies of float32 weights, with
# 16 bits; int8: quantized to 8 bits.
WeightForm = Literal["own", "packed", "bfloat16", "int8"]
WEIGHT_FORMS: tuple[WeightForm, ...] = get_args(WeightForm)

Product = Callable[[Tensor], Tensor]
Convert = Callable[[Tensor, Tensor | None], Product]


def allows_form(source: nn.Module | Tensor, form: WeightForm) -> bool:
    """Return whether this machine can compute with a layer or a matrix in a given format."""
    if form == "own":
        return True
    if isinstance(source, nn.Module) and type(source) is not nn.Linear:
        return False
    weight = source.weight if isinstance(source, nn.Linear) else source
    return type(weight) in (Tensor, nn.Parameter) and _ALLOWS[form](weight)


def product_with(weight: Tensor, bias: Tensor | None, form: WeightForm) -> Product:
    """Return a function that multiplies by a copy of a weight, and adds the bias.

    The result has the dtype of the input, except that products with int8 weights are float32.
    """
    return CONVERT[form](weight, bias)


def _own(weight: Tensor, bias: Tensor | None) -> Product:
    return partial(linear, weight=weight, bias=bias)


def _packed(weight: Tensor, bias: Tensor | None) -> Product:
    return partial(packed_product, packed=reordered(weight), bias=bias)


def _bfloat16(weight: Tensor, bias: Tensor | None) -> Product:
    return partial(_bfloat16_product, packed=reordered(weight.bfloat16()), bias=bias)


def _bfloat16_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    product = packed_product(x.bfloat16(), packed, None).to(x.dtype)
    return product if bias is None else product + bias


def _can_round(weight: Tensor) -> bool:
    """Return whether copies in bfloat16 are smaller than a weight and as fast as they can be."""
    is_float32 = weight.dtype == torch.float32
    return is_float32 and computes_bfloat16() and can_reorder(weight, torch.bfloat16)


CONVERT: Mapping[WeightForm, Convert] = {
    "own": _own,
    "packed": _packed,
    "bfloat16": _bfloat16,
    "int8": Int8Linear,
}
_ALLOWS: Mapping[WeightForm, Callable[[Tensor], bool]] = {
    "packed": can_reorder,
    "bfloat16": _can_round,
    "int8": can_quantize,
}
