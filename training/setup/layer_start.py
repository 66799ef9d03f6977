"""Giving a drafter the weights of the target's layer in whose place it stands."""

from collections.abc import Iterable

import torch
from torch import nn

from jakiro.config import DrafterSettings
from jakiro.drafter import JakiroDrafter
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

_SHARE_OF_UNITS = 7 / 8  # of the feed-forward units that an expert has at most, if there are others

_logger = get_logger(__name__)


def place_of(drafter: DrafterSettings) -> int:
    """Return the index, from the end, of the target's layer in whose place a drafter stands."""
    return -1 - drafter.tail_layers


@torch.no_grad()
def start_from(trunk: Trunk, attention: LayerAttention) -> None:
    """Give self- and, if there is one, cross-attention the weights of a target's layer.

    Keys and values of memory start from the layer's, too, and so does the norm before them: in the
    layer one norm stands before all three.
    """
    own = trunk.self_attention
    own.project.weight.copy_(torch.cat((attention.query, attention.key, attention.value)))
    own.output.weight.copy_(attention.output)
    own.norm.weight.copy_(attention.gain)
    cross = trunk.cross_attention
    if cross is not None:
        cross.query.weight.copy_(attention.query)
        cross.key_value.weight.copy_(torch.cat((attention.key, attention.value)))
        cross.output.weight.copy_(attention.output)
        for norm in (cross.norm, cross.memory_norm):
            norm.weight.copy_(attention.gain)


def warn_of_left_behind(part: str, names: tuple[str, ...]) -> None:
    """Warn of a layer's parameters, if there are any, for which a drafter's part has no place."""
    if names:
        _logger.warning(
            f"{part} has no place for these parameters of the target's layer, and starts without "
            f"them: {', '.join(names)}"
        )


def start_as_layer(
    drafter: JakiroDrafter,
    target: TargetAdapter,
    attention: LayerAttention,
    batches: Iterable[Batch],
    seed: int,
) -> None:
    """Let a drafter with the attention of the layer in whose place it stands start as that layer.

    Args:
        drafter: after `start_from`; its trunk reads features.
        target: the frozen target.
        attention: of the layer at `place_of` the drafter.
        batches: to fit on.
        seed: of the units that experts leave out.

    Raises:
        NumericalError: as `fit_layer`.
    """
    index = place_of(drafter.config.settings)
    feed_forward = read_feed_forward(target, index)
    if feed_forward is not None:
        warn_of_left_behind("drafter.experts", feed_forward.left_behind)
    fit = fit_layer(drafter, target, index, feed_forward, batches)
    num_units = tell_in_features(drafter, attention, feed_forward, fit, seed)
    number = index + len(layers_of(target))
    experts = f"{num_units} feed-forward units in each expert"
    if feed_forward is None:
        experts = "experts at random, for its feed-forward part is of another form"
    _logger.info(
        f"the drafter starts as layer {number} of the target, whose input it explains to "
        f"{fit.explained:.0%} ({fit.num_tokens:,} tokens), with {experts}"
    )


@torch.no_grad()
def tell_in_features(
    drafter: JakiroDrafter,
    attention: LayerAttention,
    feed_forward: LayerFeedForward | None,
    fit: LayerFit,
    seed: int = 0,
) -> int:
    """Give the drafter a layer's weights for a residual stream in the scale of features.

    Norms read channels that are `scale` times as large, and outputs are made so. Cross-attention,
    which the layer does not have, adds nothing yet.

    Returns:
        The units of the feed-forward part that each expert has.
    """
    trunk = drafter.trunk
    assert trunk.feature_input is not None
    trunk.feature_input.join.weight.copy_(fit.weight)
    trunk.feature_input.join.bias.copy_(fit.bias)
    if fit.encoder is not None:
        assert drafter.feature_encoder is not None
        output = drafter.feature_encoder.output
        assert isinstance(output, nn.Linear)
        output.weight.copy_(fit.encoder)
        output.bias.zero_()
    gain = attention.gain * fit.shrinkage / fit.scale
    trunk.self_attention.norm.weight.copy_(gain)
    trunk.self_attention.output.weight.copy_(fit.scale[:, None] * attention.output)
    if trunk.cross_attention is not None:
        trunk.cross_attention.norm.weight.copy_(gain)
        trunk.cross_attention.output.weight.zero_()
    if feed_forward is None:
        return 0
    return _start_experts(drafter.experts, feed_forward, fit, seed)


def _start_experts(
    experts: MixtureOfExperts, feed_forward: LayerFeedForward, fit: LayerFit, seed: int
) -> int:
    """Give experts the strongest units, not quite the same ones; return how many."""
    assert fit.strengths is not None
    generator = torch.Generator().manual_seed(seed)
    num_units = len(fit.strengths)
    if experts.num_experts > 1:
        num_units = round(num_units * _SHARE_OF_UNITS)
    num_kept = min(experts.down.shape[1], num_units)
    gate_up = experts.gate_up.weight.unflatten(0, (experts.num_experts, 2, -1))
    for expert in range(experts.num_experts):
        luck = torch.rand(len(fit.strengths), generator=generator).to(fit.strengths)
        weighed = fit.strengths * (1 + luck if experts.num_experts > 1 else 1)
        kept = weighed.argsort(descending=True)[:num_kept]
        gate_up[expert, 0, :num_kept] = feed_forward.gate[kept]
        gate_up[expert, 1, :num_kept] = feed_forward.up[kept]
        experts.down[expert].zero_()
        experts.down[expert, :num_kept] = (fit.scale[:, None] * feed_forward.down[:, kept]).T
    experts.norm.weight.copy_(feed_forward.gain * fit.shrinkage / fit.scale)
    return num_kept
