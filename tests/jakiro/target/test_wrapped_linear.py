"""A wrapped layer has the weight and the bias of the layer, also after these were replaced."""

import torch
from torch import nn

from jakiro.target.wrapped_linear import WrappedLinear


def test_weight_and_bias_are_those_of_the_layer() -> None:
    layer = nn.Linear(3, 2)
    wrapped = WrappedLinear(layer)
    assert wrapped.weight is layer.weight
    assert wrapped.bias is layer.bias
    layer.weight, layer.bias = nn.Parameter(torch.ones(2, 3)), None
    assert wrapped.weight is layer.weight
    assert wrapped.bias is None
