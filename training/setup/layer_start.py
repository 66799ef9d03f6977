"""Start of a drafter as the target's last layers: copied weights, scaled by a fit.

A trunk of n layers starts as the target's last n layers, in a residual stream in the scale of
features (`training.setup.layer_fit`). The keys and values of a block's memory then equal those of
the target's layers, where a layer's memory is the input of the target's layer in its place.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from jakiro.drafter import JakiroDrafter
from jakiro.drafter_settings import DrafterSettings
from jakiro.experts import MixtureOfExperts
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.logs import get_logger
from moa.attention import CrossAttention, SelfAttention
from moa.layers import FeedForward
from moa.memory import LayerMixture
from moa.trunk import FurtherLayer, Trunk
from training.loss.batch import Batch, read_batch
from training.setup.layer_fit import LayerFit, fit_layers
from training.setup.target_layer import (
    LayerAttention,
    LayerFeedForward,
    layers_of,
    read_feed_forward,
)

_logger = get_logger(__name__)

_SHARE_OF_UNITS = 7 / 8  # largest share of the layer's units that each of several experts has
_OWN_STATE = 6.0  # weight of a layer's own state in its mixture, before the softmax


def replaced_layer(drafter: DrafterSettings) -> int:
    """Return the index, from the end, of the last layer of the target that a drafter replaces."""
    return -1 - drafter.tail_layers


@torch.no_grad()
def start_memory(drafter: JakiroDrafter, own: Sequence[int]) -> None:
    """Make memory the input of the target's layers in the places of the drafter's, if it is read.

    Attention to memory that has the weights of such a layer then computes the layer's keys and
    values.
    """
    encoder, source = drafter.memory_encoder, drafter.state_sources.memory
    assert encoder is not None
    assert source is not None
    states = [source.layers.index(state) for state in own if state in source.layers]
    if source.kind != "hidden" or not states:
        return
    if isinstance(encoder, LayerMixture):
        encoder.mixture.zero_()
        for reader, state in enumerate(own):
            if state in source.layers:
                encoder.mixture[reader, source.layers.index(state)] = _OWN_STATE
    elif encoder.layer_attention is None and isinstance(encoder.output, nn.Linear):
        _project_to_mean(encoder.output, states)


def _project_to_mean(output: nn.Linear, states: Sequence[int]) -> None:
    width = output.weight.shape[0]
    if output.weight.shape[1] % width:
        return
    parts = output.weight.unflatten(1, (-1, width))
    parts.zero_()
    for state in states:
        parts[:, state] = torch.eye(width).to(parts) / len(states)
    if output.bias is not None:
        output.bias.zero_()


@torch.no_grad()
def start_from(trunk: Trunk, attentions: Sequence[LayerAttention]) -> None:
    """Copy the attention weights of the target's layers to those of a trunk.

    The memory and the rows of a block are projected by the same matrices, but have different norms,
    so the gain of a layer's norm becomes a factor of these matrices' columns. If there is
    cross-attention, the only layer is copied to both; the norm for queries, and the one for the
    memory, from which keys and values are computed, receive the gain of the layer's only norm.
    """
    for layer, attention in zip(trunk.self_attentions, attentions, strict=True):
        layer.project.weight.copy_(torch.cat((attention.query, attention.key, attention.value)))
        layer.output.weight.copy_(attention.output)
        _copy_optional(layer, attention)
        assert isinstance(layer.norm, nn.RMSNorm), "checked before a drafter starts as a layer"
        if trunk.memory_norm is None:
            layer.norm.weight.copy_(attention.gain)
        else:
            layer.project.weight.mul_(attention.gain)
    cross, attention = trunk.cross_attention, attentions[-1]
    if cross is not None:
        cross.query.weight.copy_(attention.query)
        cross.key_value.weight.copy_(torch.cat((attention.key, attention.value)))
        cross.output.weight.copy_(attention.output)
        for norm in (cross.norm, cross.memory_norm):
            norm.weight.copy_(attention.gain)


def _copy_optional(layer: SelfAttention, attention: LayerAttention) -> None:
    pairs = [(layer.project, attention.bias), (layer.output, attention.output_bias)]
    for linear, bias in pairs:
        if linear.bias is not None:
            linear.bias.copy_(bias)
    without = ["attention_bias"] * any(part.bias is None and bias.any() for part, bias in pairs)
    if attention.head_gains is not None:
        for norm, gain in zip(
            (layer.query_norm, layer.key_norm), attention.head_gains, strict=True
        ):
            if norm is not None:
                norm.weight.copy_(gain)
        without += ["qk_norm"] * (layer.query_norm is None)
    if without:
        _logger.warning(
            f"the drafter starts without a part of the target's attention; {' and '.join(without)} "
            "in drafter.trunk would keep it"
        )


def start_as_layers(
    drafter: JakiroDrafter,
    target: TargetAdapter,
    batches: Iterable[Batch],
    seed: int,
    views_layer: bool = False,
) -> None:
    """Copy the weights of the target's layers to the drafter that replaces them, scaled by a fit.

    Args:
        drafter: a drafter whose trunk joins tokens and features, and has been initialized by
            `start_from`.
        views_layer: whether cross-attention, instead of self-attention, adds what the layer adds.
    """
    last, count = replaced_layer(drafter.config.settings), len(layers_of(target))
    indices = range(last + 1 - len(drafter.trunk.self_attentions), last + 1)
    networks = [read_feed_forward(target, index) for index in indices]
    _logger.info("fitting the drafter's input, for which the target reads training data")
    fits = fit_layers(drafter, target, indices, networks, batches)
    num_units = scale_to_features(drafter, networks, fits, seed, views_layer)
    names = " to ".join(str(index % count) for index in dict.fromkeys((indices[0], last)))
    experts = f"{num_units} feed-forward units in each expert"
    if networks[-1] is None:
        experts = "random experts, because they cannot use the layer's feed-forward weights"
    _logger.info(
        f"the drafter starts as layer {names} of the target: the drafter's fitted input explains "
        f"{fits[0].explained:.0%} of the variance of the layer's input ({fits[0].num_tokens:,} "
        f"tokens), and the drafter has {experts}"
    )


@torch.no_grad()
def scale_to_features(
    drafter: JakiroDrafter,
    networks: Sequence[LayerFeedForward | None],
    fits: Sequence[LayerFit],
    seed: int = 0,
    views_layer: bool = False,
) -> int:
    """Adapt a drafter that was initialized by `start_from` to a stream in the scale of features.

    Each channel of this stream is `fit.scale` times as large as in the target. Therefore, gains of
    norms are divided by `fit.scale`, and outputs are multiplied by it. A layer has neither a second
    attention nor a feed-forward network before it, so their outputs are 0 at first.
    """
    trunk, cross = drafter.trunk, drafter.trunk.cross_attention
    start_join(drafter, fits[0])
    for layer, fit in zip(trunk.self_attentions, fits, strict=True):
        _scale(layer, fit, is_silent=views_layer)
    if cross is not None:
        _scale(cross, fits[-1], is_silent=not views_layer)
    if trunk.feed_forward is not None:
        trunk.feed_forward.down.weight.zero_()
    for further, network, fit in zip(trunk.further_layers, networks, fits, strict=False):
        assert isinstance(further, FurtherLayer)
        if network is not None:
            _start_feed_forward(further.feed_forward, network, fit)
    if networks[-1] is None:
        return 0
    assert isinstance(drafter.experts, MixtureOfExperts)
    return start_experts(drafter.experts, networks[-1], fits[-1], seed)


def _scale(layer: SelfAttention | CrossAttention, fit: LayerFit, is_silent: bool) -> None:
    """Scale what an attention reads and adds; nothing is added if it is silent."""
    assert isinstance(layer.norm, nn.RMSNorm), "checked before a drafter starts as a layer"
    layer.norm.weight.mul_(fit.shrinkage / fit.scale)
    added = 0 * fit.scale if is_silent else fit.scale
    layer.output.weight.mul_(added[:, None])
    if layer.output.bias is not None:
        layer.output.bias.mul_(added)


def start_join(drafter: JakiroDrafter, fit: LayerFit) -> None:
    assert drafter.trunk.feature_input is not None
    join = drafter.trunk.feature_input.join
    assert join is not None
    join.weight.copy_(fit.weight)
    join.bias.copy_(fit.bias)
    if fit.encoder is not None:
        assert drafter.feature_encoder is not None
        output = drafter.feature_encoder.output
        assert isinstance(output, nn.Linear)
        output.weight.copy_(fit.encoder)
        output.bias.zero_()


@torch.no_grad()
def start_masks(drafter: JakiroDrafter, target: TargetAdapter, batches: Sequence[Batch]) -> None:
    """Set the trained vectors of masks to the mean of the embeddings and features they replace."""
    masks = drafter.level_masks
    assert masks is not None
    token_ids = torch.cat([batch.token_ids[batch.documents >= 0] for batch in batches])
    if masks.tokens.requires_grad:
        masks.tokens.copy_(target.embed(token_ids.to(target.device)).float().mean(dim=0))
    if masks.features is not None:
        assert drafter.feature_encoder is not None
        sources, features = drafter.state_sources._replace(memory=None), []
        for batch in batches:
            batch = batch.to(target.device)
            size, length = batch.token_ids.shape
            cache = target.new_cache(size, length, sources.hidden_states)
            slots = read_batch(target, batch, cache).step.slots
            states = sources.read(cache, slots).features
            assert states is not None
            encoded = drafter.feature_encoder(states.to(drafter.dtype))
            features.append(encoded[batch.documents >= 0].float())
        masks.features.copy_(torch.cat(features).mean(dim=0))


def start_experts(
    experts: MixtureOfExperts, feed_forward: LayerFeedForward, fit: LayerFit, seed: int
) -> int:
    """Copy the layer's strongest units to each expert, and return the number of units per expert.

    If there are several experts, random factors make their selections of units differ.
    """
    assert fit.strengths is not None
    generator = torch.Generator().manual_seed(seed)
    num_units = len(fit.strengths)
    if experts.num_experts > 1:
        num_units = round(num_units * _SHARE_OF_UNITS)
    num_kept = min(experts.down.shape[1], num_units)
    gate_up = experts.gate_up_rows
    for expert in range(experts.num_experts):
        random = torch.rand(len(fit.strengths), generator=generator).to(fit.strengths)
        weighed = fit.strengths * (1 + random if experts.num_experts > 1 else 1)
        kept = weighed.argsort(descending=True)[:num_kept]
        gate_up[expert, 0, :num_kept] = feed_forward.gate[kept]
        gate_up[expert, 1, :num_kept] = feed_forward.up[kept]
        experts.down[expert].zero_()
        experts.down[expert, :num_kept] = (fit.scale[:, None] * feed_forward.down[:, kept]).T
    experts.norm.weight.copy_(feed_forward.gain * fit.shrinkage / fit.scale)
    return num_kept


def _start_feed_forward(part: FeedForward, network: LayerFeedForward, fit: LayerFit) -> None:
    assert fit.strengths is not None
    width = part.down.in_features
    kept = fit.strengths.argsort(descending=True)[:width]
    gate, up = part.gate_up.weight.chunk(2)
    gate[: len(kept)] = network.gate[kept]
    up[: len(kept)] = network.up[kept]
    part.down.weight.zero_()
    part.down.weight[:, : len(kept)] = fit.scale[:, None] * network.down[:, kept]
    part.norm.weight.copy_(network.gain * fit.shrinkage / fit.scale)
