"""Products that do not depend on the kernels of this machine."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.pytorch_utils import Conv1D


class ExactLinear(nn.Linear):
    """A product that does not depend on the number of rows, whatever kernels this machine has."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.double()
        return linear(x.double(), self.weight.double(), bias).to(x.dtype)


class ExactConv1D(Conv1D):
    """The same kind of product for the layers of GPT-2."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.double() @ self.weight.double() + self.bias.double()).to(x.dtype)


def with_products(
    model: PreTrainedModel, product: type[nn.Linear] = ExactLinear
) -> PreTrainedModel:
    """Change the linear layers of a model, and its weights to bfloat16."""
    model = model.to(torch.bfloat16)
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = product
        elif type(module) is Conv1D:
            module.__class__ = ExactConv1D
    return model


def with_uneven_experts(model: PreTrainedModel) -> PreTrainedModel:
    """Let a model's experts compute something else for a single token; other products are exact."""
    model = with_products(model)
    model.config._experts_implementation = _UNEVEN
    return model


def with_exact_experts(model: PreTrainedModel) -> PreTrainedModel:
    """Let no product of a model depend on the kernels of this machine, nor those of experts."""
    model = with_products(model)
    model.config._experts_implementation = _EXACT
    return model


def _experts(
    module: Any, hidden: Tensor, index: Tensor, weights: Tensor, *, single: float
) -> Tensor:
    """Compute experts in float64; the output of an expert with one token is multiplied."""
    output = torch.zeros_like(hidden, dtype=torch.double)
    for expert in range(module.num_experts):
        tokens, choice = torch.where(index == expert)
        rows = hidden[tokens].double() @ module.gate_up_proj[expert].double().T
        gate, up = rows.chunk(2, dim=-1)
        rows = (module.act_fn(gate) * up) @ module.down_proj[expert].double().T
        rows = rows * weights[tokens, choice, None] * (single if len(tokens) == 1 else 1)
        output.index_add_(0, tokens, rows)
    return output.to(hidden.dtype)


_UNEVEN, _EXACT = "uneven", "exact"
ALL_EXPERTS_FUNCTIONS.register(_UNEVEN, partial(_experts, single=1.01))
ALL_EXPERTS_FUNCTIONS.register(_EXACT, partial(_experts, single=1.0))
