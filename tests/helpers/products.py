"""Linear layers whose products do not depend on the kernels of this machine."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel
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
