"""What a model must be to serve as a target, and the refusal by name if it is not."""

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
    """Refuse a PEFT adapter that is not inside the layers."""
    adapter = getattr(model, "active_peft_config", None)
    if adapter is not None and adapter.is_prompt_learning:
        raise TargetNotSupported(
            "the target's adapter adds virtual tokens, which its own forward hides",
            expected="an adapter inside the layers, such as LoRA",
            got=adapter.peft_type.value,
            remedy="use the target without the adapter, or train one of another kind",
        )


def layer_kinds_of(config: Any, decoder: nn.Module, token_ids: Tensor) -> tuple[str, ...]:
    """Return each layer's attention kind."""
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
            remedy="use a target whose every layer attends over positions",
        )
    return tuple(kinds)


def _check_window(decoder: nn.Module, token_ids: Tensor) -> None:
    """Refuse a window that no layer reads: `generate()` drops rows beyond it, forward does not."""
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
            "the target's config names a sliding window that its layers do not read",
            expected="a window that forward() and generate() both keep to",
            got=type(decoder).__name__,
            remedy="set sliding_window to None in the target's config",
        )


def check_positions(config: Any, decoder: nn.Module) -> None:
    """Refuse a target whose forward does not place every token where its caller says."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_kind = [part for part in (rope, *rope.values()) if isinstance(part, dict)]
    if "longrope" in {part.get("rope_type") for part in by_kind}:
        raise TargetNotSupported(
            "the target's rotary factors depend on the length read so far",
            expected="rotary positions that are computed for each token alone",
            got="longrope",
            remedy="use a target without longrope",
        )
    takes_positions = "position_ids" in inspect.signature(decoder.forward).parameters
    if not takes_positions or getattr(config, "alibi", False):
        raise TargetNotSupported(
            "the target reads positions off the order of its cache",
            expected="a forward that is told each token's position",
            got=f"{type(decoder).__name__}, with ALiBi or positions of its own",
            remedy="use a target with rotary or learned positions",
        )


def storing_layers(cache: DynamicCache, config: Any) -> list[object]:
    """Return the cache layers that keep something: the last layers may reuse those before them."""
    reusing = getattr(config, "num_kv_shared_layers", None) or 0
    return list(cache.layers[: config.num_hidden_layers - reusing])


def max_position_of(config: Any) -> int:
    """Return how many positions a target has; refuse it if it does not say."""
    if not hasattr(config, "max_position_embeddings"):
        raise TargetNotSupported(
            "the target names no last position",
            expected="max_position_embeddings in its config",
            got=type(config).__name__,
            remedy="use a target with rotary or learned positions",
        )
    last = int(config.max_position_embeddings)
    if getattr(config, "attn_temperature_tuning", False):
        # Llama 4 scales queries by their order in the cache; up to the first step the scale is 1.
        last = min(last, int(config.floor_scale) - 1)
    return last


def head_shape_of(layer: object) -> HeadShape:
    """Return the geometry of a cache layer; refuse one that keeps no keys and values."""
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if not isinstance(keys, Tensor) or not isinstance(values, Tensor) or keys.dim() != 4:
        raise TargetNotSupported(
            "a layer of the target keeps no keys and values",
            expected="key/value attention in every layer",
            got=type(layer).__name__,
            remedy="use a target without recurrent or linear-attention layers",
        )
    return HeadShape(keys.shape[1], keys.shape[3], values.shape[3])


def check_reproduces(got: Tensor, expected: Tensor, name: str) -> None:
    """Refuse a model, by name, whose logits the adapter does not reproduce up to rounding."""
    if expected.is_meta:  # shapes without numbers
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
