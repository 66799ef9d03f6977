"""Matrices and gains of a target's linear layers and norms, however these keep them."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def have_matrices(owner: object, names: Collection[str]) -> bool:
    """Return whether linear layers of these names are there, each with a weight to be read."""
    parts = (getattr(owner, name, None) for name in names)
    return all(isinstance(getattr(part, "weight", None), Tensor) for part in parts)


def matrix_of(linear: nn.Module) -> Tensor:
    """Return the matrix that a linear layer multiplies by, with that of its adapters (PEFT).

    Where it keeps no plain matrix [out, in], as when it is quantised, its weight as it is kept.
    """
    weight: Tensor = linear.weight  # type: ignore[assignment]
    if not isinstance(linear, BaseTunerLayer) or weight.dtype not in FLOATS:
        return weight
    units = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
    with _without_bias(linear.get_base_layer()):  # which half precision would round the matrix to
        return (linear(units) - linear(torch.zeros_like(units[:1]))).T


def gain_of(norm: nn.Module | None, like: Float[Tensor, "_ hidden"]) -> Float[Tensor, " hidden"]:
    """Return what a norm multiplies each channel by, however it keeps that; 1 without a norm.

    Args:
        norm: RMS or layer norm over the last axis.
        like: whose last axis, dtype and device it has.
    """
    count = like.shape[1]
    if norm is None:
        return like.new_ones(count)
    # Of mean 0 and mean square 2^12, which no epsilon changes in float32 and whose root is exact.
    signs = 1.0 - 2.0 * (torch.arange(count, device=like.device) % 2).to(like.dtype)
    return (norm(64 * signs) - norm(-64 * signs)) / 2 * signs


@contextmanager
def _without_bias(linear: Any) -> Iterator[None]:
    bias = linear.bias
    linear.bias = None
    try:
        yield
    finally:
        linear.bias = bias


def left_behind_by(
    part: nn.Module, linears: Collection[str], norm: nn.Module | None
) -> tuple[str, ...]:
    """Return the names of parameters that neither `matrix_of` nor `gain_of` read.

    Args:
        part: of a layer, in which the linear layers are.
        linears: their names, of which the matrices were read.
        norm: before that part; of which the gain was read.
    """
    # PEFT puts a layer with adapters below one that has them.
    names = [name.replace("base_layer.", "") for name, _ in part.named_parameters()]
    own = [name for name in names if name.split(".")[0] not in linears or name.endswith(".bias")]
    of_norm = [] if norm is None else [name for name, _ in norm.named_parameters()]
    return (*own, *(f"norm.{name}" for name in of_norm if name != "weight"))
