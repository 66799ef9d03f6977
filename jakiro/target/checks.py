"""Checks that a model can serve as a target."""

import inspect
from copy import copy
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from jakiro.errors import TargetNotSupported
from jakiro.target.cache import HeadShape

CausalLM = PreTrainedModel | PeftModel

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def check_adapter(model: CausalLM) -> None:
    """Refuse a PEFT adapter that is not inside the layers.

    Raises:
        TargetNotSupported: the adapter adds virtual tokens.
    """
    adapter = getattr(model, "active_peft_config", None)
    if adapter is not None and adapter.is_prompt_learning:
        raise TargetNotSupported(
            "the target's adapter adds virtual tokens, which only its own forward sees",
            expected="an adapter inside the layers, such as LoRA",
            got=adapter.peft_type.value,
            remedy="use the target without the adapter, or train an adapter of another kind",
        )


def layer_kinds_of(config: Any, decoder: nn.Module, token_ids: Tensor) -> tuple[str, ...]:
    """Return each layer's attention kind.

    Args:
        config: config of the target's text model.
        decoder: the target without its head.
        token_ids: a few tokens to run it on.

    Raises:
        TargetNotSupported: a layer is of another kind, or ignores the config's window.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        window = getattr(config, "sliding_window", None)
        if window:
            _check_window(decoder, token_ids)
        kinds = [SLIDING if window else FULL] * config.num_hidden_layers
    if unknown := sorted(set(kinds) - {FULL, SLIDING, CHUNKED}):
        raise TargetNotSupported(
            "the target has layers that cannot branch over a draft tree",
            expected=f"layers of kind {FULL}, {SLIDING} or {CHUNKED}",
            got=", ".join(unknown),
            remedy="use a target in which every layer attends over positions",
        )
    return tuple(kinds)


def _check_window(decoder: nn.Module, token_ids: Tensor) -> None:
    """Refuse a window that no layer applies, as `generate()` would drop tokens beyond it."""
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
            "the target's config names a sliding window that its layers do not apply",
            expected="a window that forward() and generate() both apply",
            got=type(decoder).__name__,
            remedy="set sliding_window to None in the target's config",
        )


def check_positions(config: Any, decoder: nn.Module) -> None:
    """Refuse a target whose forward does not use the positions that its caller passes.

    Args:
        config: config of the target's text model.
        decoder: the target without its head.

    Raises:
        TargetNotSupported: positions follow from the cache or from the length read so far.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    by_kind = [part for part in (rope, *rope.values()) if isinstance(part, dict)]
    if "longrope" in {part.get("rope_type") for part in by_kind}:
        raise TargetNotSupported(
            "the target's rotary factors depend on the length read so far",
            expected="rotary embeddings that depend only on each token's own position",
            got="longrope",
            remedy="use a target without longrope",
        )
    takes_positions = "position_ids" in inspect.signature(decoder.forward).parameters
    if not takes_positions or getattr(config, "alibi", False):
        raise TargetNotSupported(
            "the target derives positions from the order of its cache",
            expected="a forward that takes each token's position as an argument",
            got=f"{type(decoder).__name__}, with ALiBi or positions of its own",
            remedy="use a target with rotary or learned positions",
        )


def storing_layers(cache: DynamicCache, config: Any) -> list[object]:
    """Return the cache layers that store keys and values of their own.

    Args:
        cache: a cache that the target has written to.
        config: config of the target's text model; the last layers may reuse those of others.
    """
    reusing = getattr(config, "num_kv_shared_layers", None) or 0
    return list(cache.layers[: config.num_hidden_layers - reusing])


def max_position_of(config: Any) -> int:
    """Return the number of positions of a target.

    Raises:
        TargetNotSupported: the config does not name it.
    """
    if not hasattr(config, "max_position_embeddings"):
        raise TargetNotSupported(
            "the target's config does not name its last position",
            expected="max_position_embeddings in its config",
            got=type(config).__name__,
            remedy="use a target with rotary or learned positions",
        )
    last = int(config.max_position_embeddings)
    if getattr(config, "attn_temperature_tuning", False):
        # Llama 4 scales queries by their order in the cache; the scale is 1 before `floor_scale`.
        last = min(last, int(config.floor_scale) - 1)
    return last


def head_shape_of(layer: object) -> HeadShape:
    """Return the geometry of a cache layer.

    Raises:
        TargetNotSupported: the layer stores no keys and values.
    """
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if not isinstance(keys, Tensor) or not isinstance(values, Tensor) or keys.dim() != 4:
        raise TargetNotSupported(
            "a layer of the target stores no keys and values",
            expected="key/value attention in every layer",
            got=type(layer).__name__,
            remedy="use a target without recurrent or linear-attention layers",
        )
    return HeadShape(keys.shape[1], keys.shape[3], values.shape[3])


def check_reproduces(got: Tensor, expected: Tensor, name: str) -> None:
    """Refuse a model whose logits the adapter does not reproduce up to rounding.

    Args:
        got: the adapter's logits.
        expected: the model's own logits.
        name: name of the model, for the message.

    Raises:
        TargetNotSupported: the logits differ.
    """
    if expected.is_meta:  # has only a shape
        return
    tolerance = 1e-3 if expected.dtype == torch.float32 else 5e-2
    same = got.shape == expected.shape
    error = (got.float() - expected.float()).abs().max().item() if same else float("inf")
    scale = max(1.0, expected.float().abs().max().item())
    if not error <= tolerance * scale:  # also catches NaN
        raise TargetNotSupported(
            f"the adapter does not reproduce the logits of {name}",
            expected=f"largest difference at most {tolerance * scale:.1e}",
            got=f"{error:.1e}",
            remedy='load the target with attn_implementation="eager" and without quantised '
            "activations, or report the family",
        )
