"""Parts of a target whose results for a token do not depend on the other tokens of a step.

Kernels for a CPU add the products of a single row in another order than those of several rows, and
torch multiplies small matrices, and those in float32, with still other kernels. A function of
single numbers may be computed by other instructions at the end of a tensor. In a copy of a target,
`with_independent_rows` replaces all parts where this changes the result.

Attention is computed in float64. The products of half-precision numbers are then exact, and so are
their sums, except for errors that are far below the rounding of the result. The result therefore
depends neither on the order of the keys in the cache, nor on hidden slots, nor on the number of
queries and sequences.
"""

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.activations import ACT2CLS
from transformers.pytorch_utils import Conv1D

from jakiro.target.attention import (
    Attended,
    Keys,
    Mask,
    Queries,
    Values,
    group_heads,
    register,
    ungroup_heads,
)
from jakiro.target.weights import has_adapters
from jakiro.utils.wording import dtype_name

# Up to 4,096 products, torch 2.13 does not use oneDNN. With two rows, this concerns up to 2,048
# weights, such as those of the gate of a shared expert; larger ones of the kind have a single
# output.
SMALL = 8192  # largest number of weights of a linear layer that is computed in float64
CHUNK = 128  # number of queries whose scores are computed together

Forward = Callable[..., Any]


class DoubleLinear(nn.Module):
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
                part.forward = partial(_look_up, part.forward, table)
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
    bias = None if bias is None else bias.double()
    return linear(input.double(), weight.double(), bias).to(input.dtype)


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


def _look_up(forward: Forward, table: Tensor, x: Tensor) -> Tensor:
    if x.dtype != table.dtype:
        return forward(x)
    return table[x.view(torch.int16).int() + 2**15]


def batch_invariant_attention(
    module: nn.Module,
    query: Queries,
    key: Keys,
    value: Values,
    attention_mask: Mask,
    scaling: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Attended, None]:
    """Return the attention of queries, rounded independently of other queries and sequences."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    keys, values = key.double().transpose(2, 3), value.double()
    parts = []
    for queries, mask in zip(
        query.split(CHUNK, dim=2), attention_mask.split(CHUNK, dim=2), strict=True
    ):
        scores = group_heads(queries, key.shape[1]).double() @ keys * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores += mask.repeat(1, 1, query.shape[1] // key.shape[1], 1)
        parts.append(ungroup_heads((scores.softmax(dim=-1) @ values).to(value.dtype), queries))
    return torch.cat(parts, dim=1), None


BATCH_INVARIANT = register("jakiro_batch_invariant", batch_invariant_attention)


def obstacle_to_invariance(model: nn.Module) -> str | None:
    """Return why the attention of a model cannot be made batch-invariant; None if it can.

    PEFT adapters may be switched on and off, which a copy of the layers would not notice.
    """
    config: Any = model.config
    weights = list(model.parameters())
    if any(weight.device.type != "cpu" for weight in weights):
        return f"weights on {weights[0].device}"
    if weights[0].dtype not in (torch.bfloat16, torch.float16):
        return dtype_name(weights[0].dtype)
    if has_adapters(model):
        return "a PEFT adapter"
    if any(hasattr(module, "sinks") for module in model.modules()):
        return "attention with sinks"
    if config._attn_implementation not in ("sdpa", "eager"):
        return f"attn_implementation={config._attn_implementation!r}"
    if not cast(PreTrainedModel, model)._can_set_attn_implementation():
        return f"attention of {type(model).__name__}, which cannot be replaced"
    return None
