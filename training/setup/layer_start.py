"""Start of a drafter as one layer of the target: copied weights, scaled by a fit."""

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from jakiro.drafter import JakiroDrafter
from jakiro.drafter_settings import DrafterSettings
from jakiro.experts import MixtureOfExperts
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.logs import get_logger
from moa.attention import SelfAttention
from moa.trunk import Trunk
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


def replaced_layer(drafter: DrafterSettings) -> int:
    """Return the index, from the end, of the target's layer that a drafter replaces."""
    return -1 - drafter.tail_layers


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


@torch.no_grad()
def start_from(trunk: Trunk, attention: LayerAttention) -> None:
    """Copy the attention weights of a target's layer to both kinds of attention in a trunk.

    The trunk's cross-attention has one norm for queries, and one for the memory, from which keys
    and values are computed. Both receive the gain of the layer's only norm.
    """
    layer = trunk.self_attention
    assert layer is not None
    layer.project.weight.copy_(torch.cat((attention.query, attention.key, attention.value)))
    layer.output.weight.copy_(attention.output)
    copy_optional(layer, attention)
    _set_gain(layer.norm, attention.gain)
    cross = trunk.cross_attention
    if cross is not None:
        cross.query.weight.copy_(attention.query)
        cross.key_value.weight.copy_(torch.cat((attention.key, attention.value)))
        cross.output.weight.copy_(attention.output)
        for norm in (cross.norm, cross.memory_norm):
            norm.weight.copy_(attention.gain)


def copy_optional(layer: SelfAttention, attention: LayerAttention) -> None:
    """Copy biases and norms of heads, which only some trunks and some layers have."""
    copied: list[str] = []
    if layer.project.bias is not None:
        layer.project.bias.copy_(attention.bias)
        copied += [f"{name}_proj.bias" for name in "qkv"]
    if layer.output.bias is not None:
        layer.output.bias.copy_(attention.output_bias)
        copied.append("o_proj.bias")
    if attention.head_gains is not None:
        norms = (layer.query_norm, layer.key_norm)
        for name, norm, gain in zip("qk", norms, attention.head_gains, strict=True):
            if norm is not None:
                norm.weight.copy_(gain)
                copied.append(f"{name}_norm.weight")
    _warn_of_left_behind("drafter.trunk", attention.left_behind, copied)


def _set_gain(norm: nn.Module, gain: Tensor) -> None:
    assert isinstance(norm, nn.RMSNorm), "checked before a drafter starts as a layer"
    norm.weight.copy_(gain)


def _warn_of_left_behind(
    part: str, left_behind: Iterable[str], copied: Collection[str] = ()
) -> None:
    """Warn about a layer's parameters that have no counterpart in a part of the drafter."""
    if names := [name for name in left_behind if name not in copied]:
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
        _warn_of_left_behind("drafter.experts", feed_forward.left_behind)
    _logger.info("fitting the drafter's input, for which the target reads training data")
    (fit,) = fit_layers(drafter, target, [index], [feed_forward], batches)
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
    start_join(drafter, fit)
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
    return start_experts(drafter.experts, feed_forward, fit, seed)


def start_join(drafter: JakiroDrafter, fit: LayerFit) -> None:
    """Set the matrix that joins tokens and features, and the encoder of fused states."""
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
