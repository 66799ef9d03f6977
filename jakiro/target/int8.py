"""Numbers of 8 bits: vectors, and linear layers for CPUs whose inputs are quantized on the fly.

The results are approximations. They may be used for drafting, where they cannot change the
distribution of the output, but never for the target.
"""

from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Float, Float16, Int, Int8
from torch import Tensor, nn
from torch.nn.functional import pad

GROUP = 64  # number of values of a vector with the same scale
_LEVELS = 127  # largest magnitude of a quantized number
_CHUNK = 4096  # number of weight rows that are quantized at a time, which limits the memory needed
_PROBE_SHAPES = ((1, 100, 40), (5, 100, 40), (4, 512, 1024))  # rows, in_features, out_features


class Int8Rows(NamedTuple):
    """Quantized vectors, whose length is rounded up to whole groups."""

    values: Int8[Tensor, "rows padded"]
    scales: Float16[Tensor, "rows groups"]


def num_groups(width: int) -> int:
    return -(-width // GROUP)


def quantized_rows(rows: Float[Tensor, "rows width"]) -> Int8Rows:
    """Return quantized vectors.

    Values that are not finite become 0 or the largest value that a group can have.
    """
    padding = -rows.shape[1] % GROUP
    groups = pad(rows.float().nan_to_num(), (0, padding)).unflatten(1, (-1, GROUP))
    limit = torch.finfo(torch.float16).max
    scales = (groups.abs().amax(dim=2) / _LEVELS).clamp(max=limit).half()
    divisors = scales.float().clamp(min=torch.finfo(torch.float32).tiny)[:, :, None]
    values = (groups / divisors).round().clamp(-_LEVELS, _LEVELS).to(torch.int8)
    return Int8Rows(values.flatten(1), scales)


def restored_rows(quantized: Int8Rows, width: int) -> Float[Tensor, "rows width"]:
    groups = quantized.values.unflatten(1, (-1, GROUP)).float()
    return (groups * quantized.scales.float()[:, :, None]).flatten(1)[:, :width]


class Int8Linear:
    """Computes a linear layer with a quantized copy of its weight.

    Each output channel of the weight and each row of the input has its own scale, so a row of the
    result has the same bits whatever other rows the input has. The result has no gradient.
    """

    def __init__(
        self,
        weight: Float[Tensor, "out_features in_features"],
        bias: Float[Tensor, " out_features"] | None = None,
    ) -> None:
        assert _can_multiply(), "check can_quantize first"
        quantized, self._scales = _quantize(weight.detach())
        self._weight = _pack(quantized)
        self._bias = None if bias is None else bias.detach().float()

    @torch.no_grad()
    def __call__(
        self, x: Float[Tensor, "*batch in_features"]
    ) -> Float[Tensor, "*batch out_features"]:
        """Return the float32 product with the weight, plus the bias.

        Rows that are not finite give a result that is not finite.
        """
        rows = x.reshape(-1, x.shape[-1]).float()
        tiny = torch.finfo(torch.float32).tiny
        largest = rows.abs().amax(dim=-1, keepdim=True).clamp(min=tiny)
        # In place, because on a few rows each operation takes as long as part of the product.
        quantized = (rows / largest).mul_(_LEVELS).round_()
        product = _product(quantized, self._weight, self._scales).mul_(largest)
        if self._bias is not None:
            product += self._bias
        return product.reshape(*x.shape[:-1], len(self._scales))


def can_quantize(weight: Tensor) -> bool:
    """Return whether a weight can be quantized, and this machine can multiply by the int8 copy.

    Only ordinary floating-point weights on the CPU can be quantized.
    """
    return (
        type(weight) in (Tensor, nn.Parameter)
        and weight.device.type == "cpu"
        and weight.layout == torch.strided
        and weight.is_floating_point()
        and _can_multiply()
    )


def _quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    quantized, scales = [], []
    for chunk in weight.split(_CHUNK):
        rows = chunk.float()
        scale = (rows.abs().amax(dim=1) / _LEVELS).clamp(min=torch.finfo().tiny)
        quantized.append((rows / scale[:, None]).round().to(torch.int8))
        scales.append(scale)
    return torch.cat(quantized), torch.cat(scales)


def _pack(quantized: Int[Tensor, "out_features in_features"]) -> Tensor:
    packed: Tensor = torch.ops.onednn.qlinear_prepack(quantized, None)
    return packed


def _product(
    quantized: Float[Tensor, "rows in_features"] | Int[Tensor, "rows in_features"],
    packed: Tensor,
    scales: Tensor,
) -> Float[Tensor, "rows out_features"]:
    """Return the product of the inputs `quantized / _LEVELS` and the weight.

    The operator gets no scales, because it may multiply by them in an order that depends on the
    number of rows, and round differently. Without scales, it returns sums of integers.
    """
    zero_point = _LEVELS + 1  # the operator takes unsigned inputs
    sums: Tensor = torch.ops.onednn.qlinear_pointwise(
        (quantized + zero_point).to(torch.uint8),
        1.0,
        zero_point,
        packed,
        *_no_scales(len(scales)),
        None,  # bias
        1.0,  # scale and zero point of the output, which is not quantized
        0,
        torch.float32,
        "none",  # no operation follows
        [],
        "",
    )
    return sums.mul_(scales / _LEVELS)


@cache
def _no_scales(count: int) -> tuple[Tensor, Tensor]:
    """Return the scales and zero points of weights that the operator does not scale."""
    return torch.ones(count), torch.zeros(count, dtype=torch.long)


@cache
def _can_multiply() -> bool:
    """Return whether torch's operators, which are not public, exist and give correct products.

    A processor without VNNI adds two products of an unsigned and a signed 8-bit number in 16 bits,
    which can overflow.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        return all(_is_right(*shape) for shape in _PROBE_SHAPES)
    except (AttributeError, RuntimeError):
        return False


def _is_right(rows: int, in_features: int, out_features: int) -> bool:
    """Return whether products are correct, also for the largest inputs and weights."""
    random = torch.Generator().manual_seed(0)
    shape = out_features, in_features
    weight = torch.randint(-_LEVELS, _LEVELS + 1, shape, generator=random, dtype=torch.int8)
    weight[0], weight[1] = _LEVELS, -_LEVELS
    x = torch.randint(-_LEVELS, _LEVELS + 1, (rows, in_features), generator=random)
    x[0], x[-1] = -_LEVELS, _LEVELS
    packed, scales = _pack(weight), torch.rand(out_features, generator=random) + 0.5
    product = _product(x, packed, scales)
    expected = (x @ weight.long().T).double() * scales / _LEVELS
    alone = torch.cat([_product(row[None], packed, scales) for row in x])
    is_close = torch.allclose(product.double(), expected, rtol=1e-5, atol=1e-3)
    return is_close and torch.equal(product, alone)
