"""Where a drafter's weights start: at random, at another's, or attention at a target's layer."""

import torch

from jakiro.attention_shape import AttentionShape
from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from jakiro.logs import get_logger
from jakiro.target import TargetAdapter
from moa.trunk import Trunk
from training.config import TrainSettings
from training.target_attention import LayerAttention, read_attention

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
) -> None:
    """Let a new drafter start as the settings say; the same on every process.

    Args:
        drafter: new.
        settings: of the run.
        target: at whose attention it may start.
        start: as `read_start` returns it.

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
