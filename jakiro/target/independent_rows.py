"""Parts of a target whose results for a token do not depend on the other tokens of a step.

Kernels for a CPU add the products of a single row in another order than those of several rows, and
torch multiplies small matrices, and those in float32, with still other kernels. A function of
single numbers may be computed by other instructions at the end of a tensor. In a copy of a target,
`with_independent_rows` replaces all parts where this changes the result.
"""

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from transformers.activations import ACT2CLS
from transformers.pytorch_utils import Conv1D

# Up to 4,096 products, torch 2.13 does not use oneDNN. With two rows, this concerns up to 2,048
# weights, such as those of the gate of a shared expert; larger ones of the kind have a single
# output.
SMALL = 8192  # largest number of weights of a linear layer that is computed in float64

Forward = Callable[..., Any]


class DoubleLinear(nn.Module):
    """A linear layer that computes in float64."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self._weight, self._bias = weight, bias

    def forward(
        self,
        x: Float[Tensor, "*batch inputs"],
        residual: Float[Tensor, "*batch outputs"] | None = None,
    ) -> Float[Tensor, "*batch outputs"]:
        """Return the product with the weight, plus the bias, plus another tensor."""
        product = _product(x, self._weight, self._bias)
        return product if residual is None else residual + product


def with_independent_rows(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Replace parts of a copied model whose results may depend on the number of rows.

    - Linear layers with few weights are computed in float64.
    - Routers, whose matrices are their own, compute products and sigmoids in float64, too.
    - Experts never multiply a single row.
    - Activation functions are read from a table, where their results depend on the position in a
      tensor.

    Other linear layers are not replaced: see `check_batch_invariance`.
    """
    tables: dict[bytes, Tensor] = {}
    for part in list(module.modules()):
        if has_experts(part):
            part.forward = partial(_in_pairs, part.forward)
        elif _owns_matrix(part):
            part.forward = partial(_in_float64, part.forward)
        elif _is_activation(part):
            table = _table(part, dtype)
            if table is not None:
                table = tables.setdefault(table.view(torch.int16).numpy().tobytes(), table)
                part.forward = partial(_looked_up, part.forward, table)
    return _with_double_layers(module)


def has_experts(module: nn.Module) -> bool:
    """Return whether a module computes the experts of all tokens, as transformers does."""
    names = signature(type(module).forward).parameters
    return {"hidden_states", "top_k_index", "top_k_weights"} <= set(names)


def _with_double_layers(module: nn.Module) -> nn.Module:
    if type(module) is nn.Linear and module.weight.numel() <= SMALL:
        return DoubleLinear(module.weight, module.bias)
    for name, child in module.named_children():
        setattr(module, name, _with_double_layers(child))
    return module


def _owns_matrix(module: nn.Module) -> bool:
    """Return whether a module has matrices of its own that it may multiply with, as routers do."""
    if isinstance(module, nn.Linear | nn.Embedding | Conv1D):
        return False
    return any(weight.dim() > 1 for weight in module.parameters(recurse=False))


def _is_activation(module: nn.Module) -> bool:
    kinds = {kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values()}
    return type(module) in kinds and not list(module.parameters())


def _product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
    """Return what `linear` returns, computed in float64; arguments have the same names."""
    own = None if bias is None else bias.double()
    return linear(input.double(), weight.double(), own).to(input.dtype)


_ELEMENTWISE = {Tensor.sigmoid, torch.sigmoid, functional.sigmoid, functional.softplus}


class _InFloat64(TorchFunctionMode):
    """Computes `linear`, and functions of single numbers that routers use, in float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func in _ELEMENTWISE:
            return func(args[0].double(), *args[1:], **options).to(args[0].dtype)
        return (_product if func is linear else func)(*args, **options)


def _in_float64(forward: Forward, *arguments: Any, **options: Any) -> Any:
    with _InFloat64():
        return forward(*arguments, **options)


def _in_pairs(
    forward: Forward,
    hidden_states: Float[Tensor, "tokens hidden"],
    top_k_index: Int[Tensor, "tokens active"],
    top_k_weights: Float[Tensor, "tokens active"],
) -> Float[Tensor, "tokens hidden"]:
    """Return the output of experts, each of which computes at least two tokens or none.

    If an expert has only one token, a copy of the token is computed, too.
    """
    load = top_k_index.flatten().bincount()
    is_alone = (load[top_k_index] == 1).any(dim=1)
    count = len(hidden_states)
    rows = torch.cat((torch.arange(count), is_alone.nonzero().flatten()))
    output: Tensor = forward(hidden_states[rows], top_k_index[rows], top_k_weights[rows])
    return output[:count]


def _table(activation: nn.Module, dtype: torch.dtype) -> Tensor | None:
    """Return a function's values of all numbers, if they depend on the position in a tensor."""
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    table: Tensor = activation(numbers)
    # Numbers that are not adjacent in memory are computed one by one, as at the end of a tensor.
    single = activation(numbers.repeat_interleave(2)[::2])
    is_same = torch.equal(table.nan_to_num(), single.nan_to_num())
    return None if is_same else table


def _looked_up(forward: Forward, table: Tensor, x: Tensor) -> Tensor:
    if x.dtype != table.dtype:
        return forward(x)
    return table[x.view(torch.int16).int() + 2**15]
