"""Start of a block, or of a trunk of several layers, as the target's last layers.

A trunk of n layers starts as the target's last n layers, in a residual stream in the scale of
features (`training.setup.layer_fit`). The keys and values of a block's memory then equal those of
the target's layers, where a layer's memory is the input of the target's layer in its place. The
gains of the target's norms become factors of the columns of the matrices that read the normalized
stream, because memory and rows are projected by the same matrices, but have different norms.
"""

from collections.abc import Sequence

import torch
from torch import nn

from jakiro.drafter import JakiroDrafter
from jakiro.experts import MixtureOfExperts
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.logs import get_logger
from moa.attention import SelfAttention
from moa.layers import FeedForward
from moa.memory import LayerMixture
from moa.trunk import FurtherLayer
from training.loss.batch import Batch
from training.setup.layer_fit import LayerFit, fit_layers
from training.setup.layer_start import copy_optional, replaced_layer, start_experts, start_join
from training.setup.target_layer import (
    LayerAttention,
    LayerFeedForward,
    layers_of,
    read_attention,
    read_feed_forward,
)

_logger = get_logger(__name__)

_OWN_STATE = 6.0  # weight of a layer's own state in its mixture, before the softmax


@torch.no_grad()
def start_as_layers(
    drafter: JakiroDrafter, target: TargetAdapter, batches: Sequence[Batch], seed: int
) -> None:
    """Copy the target's last layers to the drafter that replaces them, scaled by a fit.

    Args:
        drafter: a drafter whose trunk joins tokens and features.
    """
    settings, trunk = drafter.config.settings, drafter.trunk
    heads = settings.trunk.heads_for(target.spec.attention)
    layers = trunk.self_attentions
    last = replaced_layer(settings)
    indices = range(last + 1 - len(layers), last + 1)
    attentions = [read_attention(target, index, heads) for index in indices]
    networks = [read_feed_forward(target, index) for index in indices]
    _logger.info("fitting the drafter's input, for which the target reads training data")
    fits = fit_layers(drafter, target, indices, networks, batches)
    start_join(drafter, fits[0])
    if trunk.memory_norm is not None:
        trunk.memory_norm.weight.fill_(1.0)
        _start_memory(drafter, [index % len(layers_of(target)) for index in indices])
    for layer, attention, fit in zip(layers, attentions, fits, strict=True):
        start_attention(layer, attention, fit)
    for further, network, fit in zip(trunk.further_layers, networks[:-1], fits[:-1], strict=True):
        assert isinstance(further, FurtherLayer)
        if network is not None:
            _start_feed_forward(further.feed_forward, network, fit)
    if trunk.feed_forward is not None:
        trunk.feed_forward.down.weight.zero_()
    if networks[-1] is not None:
        assert isinstance(drafter.experts, MixtureOfExperts)
        start_experts(drafter.experts, networks[-1], fits[-1], seed)
    _logger.info(
        f"the drafter starts as the target's last {len(layers)} layers: its fitted input explains "
        f"{fits[0].explained:.0%} of the variance of the input of the first of them "
        f"({fits[-1].num_tokens:,} tokens)"
    )


@torch.no_grad()
def start_attention(layer: SelfAttention, attention: LayerAttention, fit: LayerFit) -> None:
    """Copy a layer's attention, for a stream in a fit's scale, and for memory without gains."""
    matrices = torch.cat((attention.query, attention.key, attention.value))
    copy_optional(layer, attention)
    layer.project.weight.copy_(matrices.float() * attention.gain.float())
    layer.output.weight.copy_(fit.scale[:, None] * attention.output)
    if layer.output.bias is not None:
        layer.output.bias.copy_(fit.scale * attention.output_bias)
    assert isinstance(layer.norm, nn.RMSNorm), "checked before a drafter starts as a layer"
    layer.norm.weight.copy_(fit.shrinkage / fit.scale)


def _start_feed_forward(part: FeedForward, network: LayerFeedForward, fit: LayerFit) -> None:
    """Copy the strongest units of a layer's feed-forward network."""
    assert fit.strengths is not None
    width = part.down.in_features
    kept = fit.strengths.argsort(descending=True)[:width]
    gate, up = part.gate_up.weight.chunk(2)
    gate[: len(kept)] = network.gate[kept]
    up[: len(kept)] = network.up[kept]
    part.down.weight.zero_()
    part.down.weight[:, : len(kept)] = fit.scale[:, None] * network.down[:, kept]
    part.norm.weight.copy_(network.gain * fit.shrinkage / fit.scale)


def _start_memory(drafter: JakiroDrafter, own: Sequence[int]) -> None:
    """Make memory the input of the target's layers in the places of the drafter's, if it is read.

    Args:
        own: index of the hidden state that is the input of the target's layer, for each layer.
    """
    encoder, source = drafter.memory_encoder, drafter.state_sources.memory
    assert encoder is not None
    assert source is not None
    states = [source.layers.index(state) for state in own if state in source.layers]
    if source.kind != "hidden" or not states:
        return
    if isinstance(encoder, LayerMixture):
        encoder.weight.zero_()
        for reader, state in enumerate(own):
            if state in source.layers:
                encoder.weight[reader, source.layers.index(state)] = _OWN_STATE
    elif encoder.layer_attention is None and isinstance(encoder.output, nn.Linear):
        _project_to_mean(encoder.output, states)


def _project_to_mean(output: nn.Linear, states: Sequence[int]) -> None:
    """Make the output the mean of some of the states that are its input."""
    width = output.weight.shape[0]
    if output.weight.shape[1] % width:
        return
    parts = output.weight.unflatten(1, (-1, width))
    parts.zero_()
    for state in states:
        parts[:, state] = torch.eye(width).to(parts) / len(states)
    if output.bias is not None:
        output.bias.zero_()
