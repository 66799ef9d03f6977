"""Memory that starts as the view which one layer of the target has of earlier tokens."""

import torch
from torch import nn

from jakiro.drafter import JakiroDrafter
from jakiro.drafter_settings import DrafterSettings
from jakiro.errors import ConfigError


def check_view(drafter: DrafterSettings, num_layers: int, index: int) -> None:
    """Raise an error unless memory can be the input of a layer of the target.

    Args:
        drafter: settings of the drafter.
        num_layers: number of layers of the target.
        index: index of the layer, negative from the end.

    Raises:
        ConfigError: there is no cross-attention, or memory is not a linear map of hidden states
            that include the layer's input.
    """
    memory, state = drafter.memory, index % num_layers
    is_linear = memory.source == "hidden" and not memory.layer_attention and not memory.common_width
    # There is one hidden state more than layers, because the embedding is one, too.
    has_state = state in {layer % (num_layers + 1) for layer in memory.layers or ()}
    if drafter.trunk.attends_memory and is_linear and has_state:
        return
    raise ConfigError(
        f"memory cannot start as the view of layer {state} of the target",
        expected="a trunk of kind moa or hybrid, and drafter.memory with source hidden, "
        f"layer_attention false, no common_width, and {state} among its layers",
        got=f"kind {drafter.trunk.kind}, source {memory.source}, layer_attention "
        f"{str(memory.layer_attention).lower()}, common_width {memory.common_width}, layers "
        f"{memory.layers}",
        remedy="change drafter.memory, or set initialize.memory to random",
    )


@torch.no_grad()
def start_memory(drafter: JakiroDrafter, state: int) -> None:
    """Make memory equal to one of the hidden states that it is made from.

    Cross-attention that has the weights of the layer with this input then computes the layer's keys
    and values from memory.

    Args:
        drafter: a drafter whose settings `check_view` accepts.
        state: index of the hidden state.
    """
    encoder, source = drafter.memory_encoder, drafter.state_sources.memory
    assert encoder is not None, "checked by `check_view`"
    assert source is not None, "checked by `check_view`"
    if not isinstance(encoder.output, nn.Linear):  # memory is the only hidden state, unchanged
        return
    width = encoder.output.weight.shape[0]
    parts = encoder.output.weight.unflatten(1, (-1, width))
    parts.zero_()
    parts[:, source.layers.index(state)] = torch.eye(width)
    if encoder.output.bias is not None:
        encoder.output.bias.zero_()
