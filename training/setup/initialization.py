"""Where a drafter's weights start: at random, at another's, or as a layer of the target."""

from collections.abc import Iterable

from torch import nn

from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from jakiro.target.adapter import TargetAdapter
from jakiro.target.attention_shape import AttentionShape
from jakiro.utils.logs import get_logger
from training.config import TrainSettings
from training.loss.batch import Batch
from training.setup.layer_start import place_of, start_as_layer, start_from, warn_of_left_behind
from training.setup.target_layer import LayerAttention, layers_of, read_attention

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
        NumericalError: as `fit_layer`.
    """
    if start is not None:
        drafter.load_state_dict(start.state_dict())
        return
    heads = settings.drafter.trunk.heads_for(target.spec.attention)
    attention = _attention_to_start_from(settings, target, heads, says_why_not=True)
    if attention is None:
        return
    _warn(attention, heads.rope_theta, target)
    start_from(drafter.trunk, attention)
    if not is_fitted(settings, target):
        _say_why_attention_alone(settings)
    elif batches is not None:
        nn.Module.to(drafter, target.device)  # the model's own `to` has lost its signature
        start_as_layer(drafter, target, attention, batches, settings.seed)


def is_fitted(settings: TrainSettings, target: TargetAdapter) -> bool:
    """Return whether a new drafter starts as a layer of the target, its input fitted to it.

    That is the last layer, or the last before the target's own that follow the drafter. It takes a
    trunk that reads features.
    """
    own, start = settings.drafter, settings.initialize
    if start.drafter is not None or start.fit_tokens == 0 or not own.trunk.reads_features:
        return False
    index = place_of(own)
    if start.attention_layer not in ("auto", index, index + len(layers_of(target))):
        return False
    heads = own.trunk.heads_for(target.spec.attention)
    return _attention_to_start_from(settings, target, heads) is not None


def _attention_to_start_from(
    settings: TrainSettings,
    target: TargetAdapter,
    heads: AttentionShape,
    *,
    says_why_not: bool = False,
) -> LayerAttention | None:
    index = settings.initialize.attention_layer
    if index is None:
        return None
    if index != "auto":
        return read_attention(target, index, heads)
    try:
        return read_attention(target, place_of(settings.drafter), heads)
    except ConfigError as error:
        if says_why_not:
            _logger.info(f"attention starts at random: {error}")
        return None


def _warn(attention: LayerAttention, rope_theta: float, target: TargetAdapter) -> None:
    warn_of_left_behind("drafter.trunk", attention.left_behind)
    if not attention.has_same_base:
        _logger.warning(
            f"drafter.trunk.rope_theta {rope_theta:g} is not how the target's layer rotates: "
            f"{_rotation_of(target)}"
        )


def _say_why_attention_alone(settings: TrainSettings) -> None:
    own, start = settings.drafter, settings.initialize
    if start.fit_tokens and own.trunk.reads_features:
        _logger.info(
            f"attention alone starts as the target's: initialize.attention_layer is "
            f"{start.attention_layer}, and the drafter stands in the place of {place_of(own)}"
        )


def _rotation_of(target: TargetAdapter) -> str:
    """Return what the target's config says of its rotary embedding."""
    found = getattr(target.config, "rope_parameters", None)
    return str(found) if found else "see its config"
