"""Initial weights of a drafter: random, from another drafter, or from a layer of the target."""

from collections.abc import Iterable

import torch
from torch import nn

from jakiro.drafter import JakiroDrafter
from jakiro.drafter_settings import DrafterSettings, TrunkSettings
from jakiro.errors import ConfigError
from jakiro.target.adapter import TargetAdapter
from jakiro.target.attention_shape import AttentionShape
from jakiro.utils.logs import get_logger
from moa.trunk import Trunk
from training.config import TrainSettings
from training.loss.batch import Batch
from training.setup.layer_start import (
    replaced_layer,
    start_as_layer,
    start_from,
    start_head,
    warn_of_left_behind,
)
from training.setup.target_layer import LayerAttention, layers_of, read_attention

_logger = get_logger(__name__)


def check_initialization(settings: TrainSettings, target: TargetAdapter) -> None:
    """Raise an error if a drafter cannot be initialized from the target layer in the settings."""
    heads = settings.drafter.trunk.heads_for(target.spec.attention)
    _attention_to_start_from(settings, target, heads)
    if settings.initialize.memory == "target_layer":
        check_view(settings.drafter, len(layers_of(target)), _layer_index(settings))


def initialize(
    drafter: JakiroDrafter,
    settings: TrainSettings,
    target: TargetAdapter,
    start: JakiroDrafter | None = None,
    batches: Iterable[Batch] | None = None,
) -> None:
    """Set the initial weights of a drafter, which are the same on every process.

    Args:
        start: the drafter that `read_start` returns; None to start without another drafter.
        batches: batches to which the drafter's input is fitted if `is_fitted` returns True; None to
            leave out the fit, because a checkpoint will be loaded.
    """
    if start is not None:
        drafter.load_state_dict(start.state_dict())
        return
    if drafter.own_head is not None:
        start_head(drafter.own_head, target, drafter.draft_ids)
    heads = settings.drafter.trunk.heads_for(target.spec.attention)
    attention = _attention_to_start_from(settings, target, heads, is_logged=True)
    if attention is None:
        return
    _warn(attention, drafter.trunk, heads.rope_theta, target)
    start_from(drafter.trunk, attention)
    views_layer = settings.initialize.memory == "target_layer"
    if views_layer:
        start_memory(drafter, _layer_index(settings) % len(layers_of(target)))
    if not is_fitted(settings, target):
        _log_why_attention_alone(settings)
    elif batches is not None:
        nn.Module.to(drafter, target.device)  # type checkers do not know `drafter.to`
        start_as_layer(drafter, target, attention, batches, settings.seed, views_layer)


def is_fitted(settings: TrainSettings, target: TargetAdapter) -> bool:
    """Return whether a new drafter starts with all weights of a target layer and a fitted input.

    That layer is the last one before the drafter's tail layers, or the target's last layer if there
    are no tail layers. Only a drafter whose trunk reads features, and joins them and single tokens
    with a bias, can be fitted.
    """
    drafter, start = settings.drafter, settings.initialize
    if start.drafter is not None or start.fit_tokens == 0 or not drafter.trunk.reads_features:
        return False
    if not drafter.trunk.input_bias or drafter.trunk.tokens != "single":
        return False
    index = replaced_layer(drafter)
    if start.attention_layer not in ("auto", index, index + len(layers_of(target))):
        return False
    heads = drafter.trunk.heads_for(target.spec.attention)
    return _attention_to_start_from(settings, target, heads) is not None


def _layer_index(settings: TrainSettings) -> int:
    """Return the index of the layer that the trunk's attention starts from."""
    index = settings.initialize.attention_layer
    return index if isinstance(index, int) else replaced_layer(settings.drafter)


def _attention_to_start_from(
    settings: TrainSettings,
    target: TargetAdapter,
    heads: AttentionShape,
    *,
    is_logged: bool = False,
) -> LayerAttention | None:
    index = settings.initialize.attention_layer
    if index is None:
        return None
    if index == "auto" and settings.initialize.memory == "target_layer":
        index = replaced_layer(settings.drafter)  # random weights would not be the layer's view
    if index != "auto":
        _check_trunk(settings.drafter.trunk)
        return read_attention(target, index, heads)
    try:
        _check_trunk(settings.drafter.trunk)
        return read_attention(target, replaced_layer(settings.drafter), heads)
    except ConfigError as error:
        if is_logged:
            _logger.info(f"the trunk's attention starts with random weights: {error}")
        return None


def _check_trunk(trunk: TrunkSettings) -> None:
    """Raise an error unless the trunk's attention has the form of a target layer's attention."""
    if trunk.num_layers != 1:
        raise ConfigError(
            "only a trunk of one layer can start with a layer of the target",
            expected="drafter.trunk.num_layers of 1",
            got=trunk.num_layers,
            remedy="set initialize.attention_layer to null",
        )
    if not trunk.attention_norm:  # as with every wide input
        raise ConfigError(
            "the trunk's attention does not have the form of a target layer's attention",
            expected="drafter.trunk.attention_norm=true and drafter.trunk.input=join",
            got=f"attention_norm={str(trunk.attention_norm).lower()} and input={trunk.input}",
            remedy="set initialize.attention_layer to null",
        )


def _warn(
    attention: LayerAttention, trunk: Trunk, rope_theta: float, target: TargetAdapter
) -> None:
    taken = _counterparts(attention, trunk)
    left = tuple(name for name in attention.left_behind if name not in taken)
    warn_of_left_behind("drafter.trunk", left)
    own = trunk.self_attention
    assert own is not None
    if trunk.cross_attention is not None:  # it has neither biases nor norms of heads
        warn_of_left_behind("the cross-attention of drafter.trunk", taken)
    elif "q_proj.bias" in left:
        form = "all" if "o_proj.bias" in left else "qkv"
        _logger.warning(f"to start with these biases, set drafter.trunk.attention_bias={form}")
    elif "q_norm.weight" in left and attention.head_gains is not None:
        _logger.warning("to start with these norms, set drafter.trunk.qk_norm=true")
    if own.query_norm is not None and attention.head_gains is None:
        _logger.warning(
            "the target's layer does not normalize each query and key, as drafter.trunk.qk_norm "
            "does, so the trunk does not start as this layer"
        )
    if not attention.has_same_base:
        _logger.warning(
            f"drafter.trunk.rope_theta={rope_theta:g} differs from the rotary embedding of "
            f"the target's layer: {_rotation_in_config(target)}"
        )


def _log_why_attention_alone(settings: TrainSettings) -> None:
    drafter, start = settings.drafter, settings.initialize
    if not drafter.trunk.input_bias:
        _logger.info(
            "only the trunk's attention starts with weights of the target: a fit of the drafter's "
            "input needs drafter.trunk.input_bias=true"
        )
    elif drafter.trunk.tokens != "single":
        _logger.info(
            "only the trunk's attention starts with weights of the target: a fit of the drafter's "
            "input needs drafter.trunk.tokens=single"
        )
    elif start.fit_tokens and drafter.trunk.reads_features:
        _logger.info(
            "only the trunk's attention starts with weights of the target: "
            f"initialize.attention_layer is {start.attention_layer}, but the drafter replaces "
            f"layer {replaced_layer(drafter)}"
        )


def _counterparts(attention: LayerAttention, trunk: Trunk) -> tuple[str, ...]:
    """Return the names of the layer's biases and norms of heads that self-attention has, too."""
    own = trunk.self_attention
    assert own is not None
    names = [] if own.project.bias is None else ["q_proj.bias", "k_proj.bias", "v_proj.bias"]
    names += [] if own.output.bias is None else ["o_proj.bias"]
    has_norms = own.query_norm is not None and attention.head_gains is not None
    names += ["q_norm.weight", "k_norm.weight"] if has_norms else []
    return tuple(name for name in attention.left_behind if name in names)


def _rotation_in_config(target: TargetAdapter) -> str:
    """Return the parameters of the rotary embedding in the target's config."""
    found = getattr(target.config, "rope_parameters", None)
    return str(found) if found else "see the target's config"


def check_view(drafter: DrafterSettings, num_layers: int, index: int) -> None:
    """Raise an error unless memory can be the input of a layer of the target."""
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
