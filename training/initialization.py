"""Where a drafter's weights start: at random, at another's, or as a layer of the target."""

from collections.abc import Iterable

import torch
from torch import nn

from jakiro.attention_shape import AttentionShape
from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from jakiro.experts import ExpertBank
from jakiro.logs import get_logger
from jakiro.target import TargetAdapter
from moa.trunk import Trunk
from training.batch import Batch
from training.config import TrainSettings
from training.layer_fit import LayerFit, fit_layer
from training.target_attention import LayerAttention, layers_of, read_attention
from training.target_feed_forward import LayerFeedForward, read_feed_forward

_SHARE_OF_UNITS = 7 / 8  # of the feed-forward units that an expert has at most, if there are others

_logger = get_logger(__name__)


def check_initialization(settings: TrainSettings, target: TargetAdapter) -> None:
    """Refuse settings whose drafter cannot start as they say.

    Raises:
        ConfigError: as `read_attention`.
    """
    heads = settings.drafter.trunk.heads_for(target.spec.attention)
    _attention_to_start_from(settings, target, heads)


def initialize(
    drafter: JakiroDrafter,
    settings: TrainSettings,
    target: TargetAdapter,
    start: JakiroDrafter | None = None,
    batches: Iterable[Batch] | None = None,
) -> None:
    """Let a new drafter start as the settings say; the same on every process.

    Args:
        drafter: new.
        settings: of the run.
        target: as whose layer it may start.
        start: as `read_start` returns it.
        batches: to fit its input on, if `is_fitted`; None where a checkpoint will be loaded.

    Raises:
        ConfigError: as `read_attention`.
    """
    if start is not None:
        drafter.load_state_dict(start.state_dict())
        return
    heads = settings.drafter.trunk.heads_for(target.spec.attention)
    attention = _attention_to_start_from(settings, target, heads)
    if attention is not None:
        _warn(attention, heads.rope_base, target)
        start_from(drafter.trunk, attention)
        if batches is not None and is_fitted(settings, target):
            nn.Module.to(drafter, target.device)  # the model's own `to` has lost its signature
            start_as_last_layer(drafter, target, attention, batches, settings.seed)


def is_fitted(settings: TrainSettings, target: TargetAdapter) -> bool:
    """Return whether a new drafter starts as the target's last layer, its input fitted to it.

    That takes a trunk that reads features, and predictions that are features: not what the target's
    own last layers read, which some drafters leave in place.
    """
    own = settings.drafter
    if settings.initialize.fit_tokens == 0 or not own.trunk.reads_features or own.tail_layers:
        return False
    last = len(layers_of(target)) - 1
    if settings.initialize.attention_layer not in ("auto", -1, last):
        return False
    heads = own.trunk.heads_for(target.spec.attention)
    return _attention_to_start_from(settings, target, heads) is not None


def _attention_to_start_from(
    settings: TrainSettings, target: TargetAdapter, heads: AttentionShape
) -> LayerAttention | None:
    index = settings.initialize.attention_layer
    if index is None:
        return None
    if index != "auto":
        return read_attention(target, index, heads)
    try:
        return read_attention(target, -1, heads)
    except ConfigError as error:
        _logger.info(f"attention starts at random: {error}")
        return None


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


def start_as_last_layer(
    drafter: JakiroDrafter,
    target: TargetAdapter,
    attention: LayerAttention,
    batches: Iterable[Batch],
    seed: int,
) -> None:
    """Let a drafter whose attention is the target's last layer's start as that layer, as a whole.

    Args:
        drafter: after `start_from`; its trunk reads features.
        target: the frozen target.
        attention: of its last layer.
        batches: to fit on.
        seed: of the units that experts leave out.
    """
    feed_forward = read_feed_forward(target, -1)
    fit = fit_layer(drafter, target, feed_forward, batches)
    num_units = tell_in_features(drafter, attention, feed_forward, fit, seed)
    _logger.info(
        f"the drafter starts as the target's last layer, whose input it explains to "
        f"{fit.explained:.0%} ({fit.num_tokens:,} tokens), with {num_units} feed-forward units "
        "in each expert"
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
    gain = attention.gain * fit.shrinkage / fit.scale
    trunk.self_attention.norm.weight.copy_(gain)
    trunk.self_attention.output.weight.copy_(fit.scale[:, None] * attention.output)
    if trunk.cross_attention is not None:
        trunk.cross_attention.norm.weight.copy_(gain)
        trunk.cross_attention.output.weight.zero_()
    if feed_forward is None:
        return 0
    return _start_bank(drafter.bank, feed_forward, fit, seed)


def _start_bank(bank: ExpertBank, feed_forward: LayerFeedForward, fit: LayerFit, seed: int) -> int:
    """Give experts the strongest units, not quite the same ones; return how many."""
    assert fit.strengths is not None
    generator = torch.Generator().manual_seed(seed)
    num_units = len(fit.strengths)
    if bank.num_experts > 1:
        num_units = round(num_units * _SHARE_OF_UNITS)
    num_kept = min(bank.down.shape[1], num_units)
    gate_up = bank.gate_up.weight.unflatten(0, (bank.num_experts, 2, -1))
    for expert in range(bank.num_experts):
        luck = torch.rand(len(fit.strengths), generator=generator).to(fit.strengths)
        weighed = fit.strengths * (1 + luck if bank.num_experts > 1 else 1)
        kept = weighed.argsort(descending=True)[:num_kept]
        gate_up[expert, 0, :num_kept] = feed_forward.gate[kept]
        gate_up[expert, 1, :num_kept] = feed_forward.up[kept]
        bank.down[expert].zero_()
        bank.down[expert, :num_kept] = (fit.scale[:, None] * feed_forward.down[:, kept]).T
    bank.norm.weight.copy_(feed_forward.gain * fit.shrinkage / fit.scale)
    return num_kept


def _warn(attention: LayerAttention, rope_base: float, target: TargetAdapter) -> None:
    if attention.left_behind:
        _logger.warning(
            "drafter.trunk has no place for these parameters of the target's layer, and starts "
            f"without them: {', '.join(attention.left_behind)}"
        )
    if not attention.has_same_base:
        _logger.warning(
            f"drafter.trunk.rope_base {rope_base:g} is not how the target's layer rotates: "
            f"{_rotation_of(target)}"
        )


def _rotation_of(target: TargetAdapter) -> str:
    """Return what the target's config says of its rotary embedding."""
    found = getattr(target.config, "rope_parameters", None)
    return str(found) if found else "see its config"
