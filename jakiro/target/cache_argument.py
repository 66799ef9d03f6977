"""The name of the argument with which a model of transformers takes its cache."""

import inspect

from torch import nn


def cache_argument(module: nn.Module) -> str:
    """Return `cache`, or `past_key_values` for models of transformers before 5.24."""
    parameters = inspect.signature(module.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"
