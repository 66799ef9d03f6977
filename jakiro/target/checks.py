"""Checks of whether a model can be a target, and functions that read its geometry."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DummyLayer, LinearAttentionCacheLayerMixin

from jakiro.errors import TargetNotSupported
from jakiro.target.attention_shape import HeadShape, KeyRotation

if TYPE_CHECKING:
    from peft import PeftModel  # an optional package, and slow to import

    CausalLM = PreTrainedModel | PeftModel
else:
    CausalLM = nn.Module

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
ATTENTION_KINDS = {FULL, SLIDING, CHUNKED}
_OFFSET = 5  # distance between the positions at which the keys of the same tokens are compared


def check_model(model: CausalLM) -> None:
    """Raise an error if a model is loaded in a way in which it cannot read a draft tree."""
    adapter = getattr(model, "active_peft_config", None)
    if adapter is not None and adapter.is_prompt_learning:
        raise TargetNotSupported(
            "the target's adapter needs virtual tokens, which only PEFT's own forward method adds",
            expected="an adapter inside the layers, such as LoRA",
            got=adapter.peft_type.value,
        )
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:  # the cache is on a single one
        raise TargetNotSupported(
            "the target's weights are on several devices",
            got=", ".join(devices),
            remedy='load it with device_map="cuda", and with quantized weights if it does not fit',
        )
    name = getattr(model.config.get_text_config(), "_attn_implementation", None) or ""
    if "flash" in name or "/" in name:
        raise TargetNotSupported(
            "the target's implementation of attention takes no mask of a draft tree",
            got=name,
            remedy='load it with attn_implementation="sdpa", or "eager" if it does not have that',
        )


def cache_argument(module: nn.Module) -> str:
    """Return the name of the argument with which a model of transformers takes its cache.

    This is `cache`, or `past_key_values` for models of transformers before 5.24.
    """
    parameters = inspect.signature(module.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def layer_kinds_of(config: Any, decoder: nn.Module, token_ids: Tensor) -> tuple[str, ...]:
    """Return each layer's kind, which is none of `ATTENTION_KINDS` for a recurrent layer."""
    if getattr(config, "attention_layers", None) is not None:  # GPT-Neo
        raise TargetNotSupported(
            f"the layers of {type(decoder).__name__} mask tokens by their index in the cache, and "
            "not by the mask that forward() gets"
        )
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        window = getattr(config, "sliding_window", None)
        if window:
            _check_window(decoder, token_ids)
        kinds = [SLIDING if window else FULL] * config.num_hidden_layers
    others = set(kinds) - ATTENTION_KINDS
    layers = DynamicCache(config=config).layers if others else []
    if unknown := {
        kind
        for kind, layer in zip(kinds, layers, strict=False)
        if kind in others and not isinstance(layer, LinearAttentionCacheLayerMixin | DummyLayer)
    }:
        raise TargetNotSupported(
            "the target has layers that cannot process drafts",
            expected=f"recurrent layers, and layers of kind {FULL}, {SLIDING} or {CHUNKED}",
            got=", ".join(sorted(unknown)),
        )
    return tuple(kinds)


def _check_window(decoder: nn.Module, token_ids: Tensor) -> None:
    """Raise an error if no layer applies the config's window.

    With such a config, `generate()` would drop tokens that the layers still attend to.
    """
    config = decoder.config
    wide = decoder(input_ids=token_ids, use_cache=False).last_hidden_state
    narrowed: Any = copy(config)
    narrowed.sliding_window = 1
    decoder.config = narrowed
    try:
        narrow = decoder(input_ids=token_ids, use_cache=False).last_hidden_state
    finally:
        decoder.config = config
    if not wide.is_meta and torch.equal(wide, narrow):
        raise TargetNotSupported(
            "the target's config sets a sliding window that the target's layers do not apply",
            got=type(decoder).__name__,
            remedy="set sliding_window to None in the target's config",
        )


def check_positions(config: Any, decoder: nn.Module) -> None:
    """Raise an error if a token's position is not taken from the argument of `forward` alone."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_kind = [part for part in (rope, *rope.values()) if isinstance(part, dict)]
    if "longrope" in {part.get("rope_type") for part in by_kind}:
        raise TargetNotSupported(
            "the target's rotary embedding depends on the current length of the sequence",
            got="longrope",
            remedy="use a target without longrope",
        )
    takes_positions = "position_ids" in inspect.signature(decoder.forward).parameters
    if not takes_positions or getattr(config, "alibi", False):
        raise TargetNotSupported(
            "the target derives positions from the order of its cache",
            got=f"{type(decoder).__name__}, which has ALiBi, its own positions, or no attention",
            remedy="use a target with rotary or learned positions",
        )


def storing_layers(cache: DynamicCache, config: Any) -> list[Any]:
    """Return the cache layers that store keys and values of their own.

    In some models, the last layers reuse the keys and values of earlier layers.
    """
    reusing = getattr(config, "num_kv_shared_layers", None) or 0
    return list(cache.layers[: config.num_hidden_layers - reusing])


def max_position_of(config: Any) -> int:
    if not hasattr(config, "max_position_embeddings"):
        raise TargetNotSupported(
            "the target's config has no max_position_embeddings", got=type(config).__name__
        )
    last = int(config.max_position_embeddings)
    if getattr(config, "attn_temperature_tuning", False):
        # Llama 4 scales queries by their index in the cache, which is not their position here.
        # Below `floor_scale`, the scale is always 1.
        last = min(last, int(config.floor_scale) - 1)
    return last


def head_shape_of(layer: object) -> HeadShape:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if not isinstance(keys, Tensor) or not isinstance(values, Tensor) or keys.dim() != 4:
        raise TargetNotSupported(
            "a layer of the target does not store keys and values",
            got=type(layer).__name__,
        )
    return HeadShape(keys.shape[1], keys.shape[3], values.shape[3])


def measure_rotation(
    decoder: nn.Module, shapes: Sequence[HeadShape], keys_at: Callable[[int], list[Tensor]]
) -> KeyRotation | None:
    """Return the rotation of a target's keys; None unless it is the same in all layers.

    If a text is moved by some positions, the hidden states of a target with rotary embeddings stay
    the same, and each key is rotated by the distance. This is measured in all layers.

    Args:
        keys_at: function that returns the keys [1, heads, tokens, dim] of each layer for a text
            that begins at the given position.
    """
    rotary = getattr(decoder, "rotary_emb", None)
    frequencies = getattr(rotary, "inv_freq", None)
    scale = getattr(rotary, "attention_scaling", 1.0)
    if not isinstance(frequencies, Tensor) or not isinstance(scale, int | float):
        return None
    width = 2 * len(frequencies)
    if len(set(shapes)) > 1 or (shapes[0].key_dim, shapes[0].value_dim) != (width, width):
        return None
    if frequencies.is_meta:  # a target without values, whose memory is estimated
        return KeyRotation(frequencies=(1.0,) * len(frequencies), scale=float(scale))
    angles = (_OFFSET * frequencies.float()).to(torch.float32)
    cos, sin = angles.cos(), angles.sin()
    for start, moved in zip(keys_at(0), keys_at(_OFFSET), strict=True):
        first, second = start.float().chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        bound = _tolerance(start.dtype) * turned.abs().max()
        if not (turned - moved.float()).abs().max() <= bound:
            return None
    return KeyRotation(frequencies=tuple(frequencies.float().tolist()), scale=float(scale))


def check_reproduces(got: Tensor, expected: Tensor, name: str) -> None:
    """Raise an error if the adapter does not reproduce a model's logits up to rounding."""
    if expected.is_meta:  # a tensor with a shape but no values
        return
    logits = expected.float()
    finite = logits.isfinite()
    if not (logits < float("inf")).all() or not finite.any():
        raise TargetNotSupported(
            f"the logits of {name} are not finite numbers, also without this package",
            remedy="check the weights of the target, or load it in another dtype",
        )
    tolerance = _tolerance(expected.dtype)
    # A few huge logits, such as those of tokens that can never be chosen, allow no larger
    # differences elsewhere.
    typical = logits[finite].abs().median().clamp(min=0.25)
    allowed = tolerance * logits.abs().maximum(4 * typical)
    error = float("inf")
    if got.shape == logits.shape and torch.equal(got.isfinite(), finite):
        error = ((got.float() - logits).abs() / allowed)[finite].max().item() * tolerance
    if error > tolerance:
        raise TargetNotSupported(
            f"the adapter does not reproduce the logits of {name}",
            expected=f"differences of at most {tolerance:.0e} of a typical logit",
            got=f"{error:.1e}",
            remedy='load the target with attn_implementation="eager" and without quantized '
            "activations, or report this model family as unsupported",
        )


def check_same(pairs: Iterable[tuple[Tensor, Tensor]], dtype: torch.dtype) -> None:
    """Raise an error if the two tensors of any pair differ by more than the rounding of a dtype.

    In half precision, rounding may choose other experts and so change a text, but not most texts.

    Args:
        pairs: tensors with a row for each text.
    """
    for got, expected in pairs:
        if expected.is_meta:
            continue
        finite = expected.isfinite()
        rows = [part.where(finite, 0).float().flatten(1) for part in (got - expected, expected)]
        if dtype == torch.float32:
            error, bound = torch.div(*(part.abs().max() for part in rows)), 1e-4
        else:
            error, bound = torch.div(*(part.norm(dim=1) for part in rows)).median(), 0.06
        if not error <= bound:
            raise TargetNotSupported(f"a relative difference of {error:.1e}")


@contextmanager
def naming_recurrence(model: CausalLM) -> Iterator[None]:
    """Raise any failure of a model with recurrent layers as an error that names these layers."""
    failures = (AttributeError, TypeError, ValueError, RuntimeError, LookupError)
    try:
        yield
    except (TargetNotSupported, *failures) as error:
        raise TargetNotSupported(
            f"the recurrent layers of {type(model).__name__} do not read several tokens at once as "
            "they read one after the other",
            got=str(error).partition(";")[0],
        ) from error


def _tolerance(dtype: torch.dtype) -> float:
    """Return the relative error that rounding in many layers may have."""
    return 1e-3 if dtype == torch.float32 else 5e-2
