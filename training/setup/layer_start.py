"""Initialization of a drafter with the weights of the target's layer that the drafter replaces."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from jakiro.drafter import JakiroDrafter
from jakiro.drafter_settings import DrafterSettings
from jakiro.experts import MixtureOfExperts
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.logs import get_logger
from moa.trunk import Trunk
from training.loss.batch import Batch
from training.setup.layer_fit import LayerFit, fit_layer
from training.setup.target_layer import (
    LayerAttention,
    LayerFeedForward,
    layers_of,
    read_feed_forward,
)

_SHARE_OF_UNITS = 7 / 8  # largest share of the layer's units that each of several experts has

_logger = get_logger(__name__)


def replaced_layer(drafter: DrafterSettings) -> int:
    """Return the index, from the end, of the target's layer that a drafter replaces."""
    return -1 - drafter.tail_layers


@torch.no_grad()
def start_from(trunk: Trunk, attention: LayerAttention) -> None:
    """Copy the attention weights of a target's layer to both kinds of attention in a trunk.

    The trunk's cross-attention has one norm for queries, and one for the memory, from which keys
    and values are computed. Both receive the gain of the layer's only norm.
    """
    own = trunk.self_attention
    assert own is not None
    own.project.weight.copy_(torch.cat((attention.query, attention.key, attention.value)))
    own.output.weight.copy_(attention.output)
    if own.project.bias is not None:
        own.project.bias.copy_(attention.bias)
    if own.output.bias is not None:
        own.output.bias.copy_(attention.output_bias)
    if own.query_norm is not None and own.key_norm is not None and attention.head_gains is not None:
        for norm, gain in zip((own.query_norm, own.key_norm), attention.head_gains, strict=True):
            norm.weight.copy_(gain)
    _set_gain(own.norm, attention.gain)
    cross = trunk.cross_attention
    if cross is not None:
        cross.query.weight.copy_(attention.query)
        cross.key_value.weight.copy_(torch.cat((attention.key, attention.value)))
        cross.output.weight.copy_(attention.output)
        for norm in (cross.norm, cross.memory_norm):
            norm.weight.copy_(attention.gain)


@torch.no_grad()
def start_head(own: nn.Linear, target: TargetAdapter, token_ids: Tensor | None) -> None:
    """Copy the rows of the target's head to a drafter's own head, if they are a plain matrix."""
    weight = getattr(target.head, "weight", None)
    if type(target.head) is not nn.Linear or not isinstance(weight, Tensor):
        _logger.info("the drafter's own head starts with random weights")
        return
    rows = weight if token_ids is None else weight[token_ids.to(weight.device)]
    own.weight.copy_(rows)


def _set_gain(norm: nn.Module, gain: Tensor) -> None:
    assert isinstance(norm, nn.RMSNorm), "checked before a drafter starts as a layer"
    norm.weight.copy_(gain)


def warn_of_left_behind(part: str, names: Sequence[str]) -> None:
    """Warn about a layer's parameters that have no counterpart in a part of the drafter."""
    if names:
        _logger.warning(
            f"{part} has no counterpart for these parameters of the target's layer, and starts "
            f"without them: {', '.join(names)}"
        )


def start_as_layer(
    drafter: JakiroDrafter,
    target: TargetAdapter,
    attention: LayerAttention,
    batches: Iterable[Batch],
    seed: int,
    views_layer: bool = False,
) -> None:
    """Copy the weights of a target's layer to the drafter that replaces it, scaled by a fit.

    Args:
        drafter: a drafter whose trunk reads features and has been initialized by `start_from`.
        attention: attention weights of the layer that the drafter replaces (`replaced_layer`).
        views_layer: whether cross-attention, instead of self-attention, adds what the layer adds.
    """
    index = replaced_layer(drafter.config.settings)
    feed_forward = read_feed_forward(target, index)
    if feed_forward is not None:
        warn_of_left_behind("drafter.experts", feed_forward.left_behind)
    _logger.info("fitting the drafter's input, for which the target reads training data")
    fit = fit_layer(drafter, target, index, feed_forward, batches)
    num_units = scale_to_features(drafter, attention, feed_forward, fit, seed, views_layer)
    number = index + len(layers_of(target))
    experts = f"{num_units} feed-forward units in each expert"
    if feed_forward is None:
        experts = "random experts, because they cannot use the layer's feed-forward weights"
    _logger.info(
        f"the drafter starts as layer {number} of the target: the drafter's fitted input explains "
        f"{fit.explained:.0%} of the variance of the layer's input ({fit.num_tokens:,} "
        f"tokens), and the drafter has {experts}"
    )


@torch.no_grad()
def scale_to_features(
    drafter: JakiroDrafter,
    attention: LayerAttention,
    feed_forward: LayerFeedForward | None,
    fit: LayerFit,
    seed: int = 0,
    views_layer: bool = False,
) -> int:
    """Copy a layer's weights to a drafter, adapted to a residual stream in the scale of features.

    Each channel of this stream is `fit.scale` times as large as in the target. Therefore, gains of
    norms are divided by `fit.scale`, and outputs are multiplied by it. The layer has neither a
    second attention nor a feed-forward network before it, so their outputs are 0 at first.

    Args:
        feed_forward: feed-forward weights of the layer; None to leave the experts unchanged.

    Returns:
        The number of feed-forward units that are copied to each expert.
    """
    trunk = drafter.trunk
    assert trunk.feature_input is not None
    join = trunk.feature_input.join
    assert join is not None
    join.weight.copy_(fit.weight)
    join.bias.copy_(fit.bias)
    if fit.encoder is not None:
        assert drafter.feature_encoder is not None
        output = drafter.feature_encoder.output
        assert isinstance(output, nn.Linear)
        output.weight.copy_(fit.encoder)
        output.bias.zero_()
    gain = attention.gain * fit.shrinkage / fit.scale
    assert trunk.self_attention is not None
    _set_gain(trunk.self_attention.norm, gain)
    added = fit.scale[:, None] * attention.output
    trunk.self_attention.output.weight.copy_(0 * added if views_layer else added)
    if trunk.self_attention.output.bias is not None:
        added_bias = fit.scale * attention.output_bias
        trunk.self_attention.output.bias.copy_(0 * added_bias if views_layer else added_bias)
    if trunk.cross_attention is not None:
        trunk.cross_attention.norm.weight.copy_(gain)
        trunk.cross_attention.output.weight.copy_(added if views_layer else 0 * added)
    if trunk.feed_forward is not None:
        trunk.feed_forward.down.weight.zero_()
    if feed_forward is None:
        return 0
    assert isinstance(drafter.experts, MixtureOfExperts)
    return _start_experts(drafter.experts, feed_forward, fit, seed)


def _start_experts(
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
