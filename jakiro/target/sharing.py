"""Copies of a model that share its tensors, and the replacement of attention in such copies."""

import copy
from typing import Any

from torch import nn


def sharing_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model that shares all tensors, linear layers and configs."""
    # Linear layers are shared, too: all copies then use the same reordered weights, and notice if
    # a weight is replaced.
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    shared: dict[int, Any] = {id(layer): layer for layer in layers}
    shared |= {id(tensor): tensor for tensor in model.parameters()}
    shared |= {id(tensor): tensor for tensor in model.buffers()}
    configs = (getattr(module, "config", None) for module in model.modules())
    shared |= {id(config): config for config in configs if config is not None}
    return copy.deepcopy(model, shared)


def with_attention(module: nn.Module, implementation: str) -> nn.Module:
    """Set how a copy of a model computes attention, and return the copy."""
    replaced: dict[int, Any] = {}
    for part in module.modules():
        config = getattr(part, "config", None)
        if config is None or not hasattr(config, "_attn_implementation"):
            continue
        if id(config) not in replaced:
            replaced[id(config)] = copy.deepcopy(config)
            replaced[id(config)]._attn_implementation = implementation
        part.config = replaced[id(config)]
    return module
