"""Attention of a target: grouped for the few queries of a step, or with a given rounding on a CPU.

transformers repeats keys and values for every query head, unless there is only one query.
`grouped_attention` turns the query heads that share keys into queries of a single head, so that
nothing is repeated.

`batch_invariant_attention` computes in float64. The products of half-precision numbers are then
exact, and so are their sums, except for errors that are far below the rounding of the result. The
result therefore depends neither on the order of the keys in the cache, nor on hidden slots, nor on
the number of queries and sequences.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from jakiro.target.packed_linear import has_adapters
from jakiro.target.split_attention import attend
from jakiro.utils.dtype_names import dtype_name

MOST_QUERIES = 64  # with more queries than this, repeated keys cost little in comparison
CHUNK = 128  # number of queries whose scores are computed together in float64

Queries = Float[Tensor, "batch heads queries dim"]
Keys = Float[Tensor, "batch kv_heads slots dim"]
Values = Float[Tensor, "batch kv_heads slots value_dim"]
Mask = Float[Tensor, "batch 1 queries slots"]
Attended = Float[Tensor, "batch queries heads value_dim"]


def grouped_attention(
    module: nn.Module,
    query: Queries,
    key: Keys,
    value: Values,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Attended, None]:
    """Return what `sdpa` attention of transformers returns, without repeated keys and values.

    Calls without a mask that all heads share, without key heads that query heads share, with
    options such as dropout, or with many queries are passed on to transformers.
    """
    groups, is_cuda = query.shape[1] // key.shape[1], query.is_cuda
    is_special = options.get("dropout") or options.get("softcap") or options.get("cache")
    is_special = is_special or options.get("position_bias") is not None
    # A mask for every group must not be larger than the keys and values that it saves.
    most = MOST_QUERIES if is_cuda else max(MOST_QUERIES, 2 * key.shape[1] * key.shape[3])
    is_special = is_special or query.shape[2] > most
    if groups == 1 and not is_cuda:  # a GPU may process the keys in several parts
        is_special = True
    if is_special or not _is_shared(attention_mask):
        attended, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return attended, None
    assert attention_mask is not None
    mask = _repeated(attention_mask, groups)
    grouped = _grouped(query, key.shape[1])
    return _ungrouped(attend(grouped, key, value, mask, scaling), query), None


def batch_invariant_attention(
    module: nn.Module,
    query: Queries,
    key: Keys,
    value: Values,
    attention_mask: Mask,
    scaling: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Attended, None]:
    """Return the attention of queries, rounded independently of other queries and sequences."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    keys, values = key.double().transpose(2, 3), value.double()
    parts = []
    for queries, mask in zip(
        query.split(CHUNK, dim=2), attention_mask.split(CHUNK, dim=2), strict=True
    ):
        scores = _grouped(queries, key.shape[1]).double() @ keys * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores += mask.repeat(1, 1, query.shape[1] // key.shape[1], 1)
        parts.append(_ungrouped((scores.softmax(dim=-1) @ values).to(value.dtype), queries))
    return torch.cat(parts, dim=1), None


def obstacle_to_invariance(model: nn.Module) -> str | None:
    """Return why the attention of a model cannot be made batch-invariant; None if it can.

    PEFT adapters may be switched on and off, which a copy of the layers would not notice.
    """
    config: Any = model.config
    weights = list(model.parameters())
    if any(weight.device.type != "cpu" for weight in weights):
        return f"weights on {weights[0].device}"
    if weights[0].dtype not in (torch.bfloat16, torch.float16):
        return dtype_name(weights[0].dtype)
    if has_adapters(model):
        return "a PEFT adapter"
    if any(hasattr(module, "sinks") for module in model.modules()):
        return "attention with sinks"
    if config._attn_implementation not in ("sdpa", "eager"):
        return f"attn_implementation={config._attn_implementation!r}"
    if not cast(PreTrainedModel, model)._can_set_attn_implementation():
        return f"attention of {type(model).__name__}, which cannot be replaced"
    return None


def _is_shared(mask: Tensor | None) -> bool:
    """Return whether there is a mask, and all heads have the same one."""
    return mask is not None and mask.dim() == 4 and mask.shape[1] == 1


def _repeated(mask: Mask, groups: int) -> Float[Tensor, "batch 1 rows slots"]:
    """Return the mask of queries that are grouped, which all layers of a step share."""
    if groups == 1:
        return mask
    if torch.compiler.is_compiling():
        return mask.repeat(1, 1, groups, 1)
    known: dict[int, Tensor] = getattr(mask, "_by_groups", {})
    if groups not in known:
        known[groups] = mask.repeat(1, 1, groups, 1)
        mask._by_groups = known  # type: ignore[attr-defined]
    return known[groups]


def _grouped(query: Tensor, num_kv_heads: int) -> Float[Tensor, "batch kv_heads rows dim"]:
    """Return the queries of all heads that share keys, one head after the other, as one head."""
    return query.reshape(query.shape[0], num_kv_heads, -1, query.shape[3])


def _ungrouped(attended: Tensor, query: Tensor) -> Attended:
    batch, heads, count, _ = query.shape
    return attended.reshape(batch, heads, count, -1).transpose(1, 2).contiguous()


def _registered(name: str, function: Callable[..., Any]) -> str:
    """Register an attention function with transformers, and return its name."""
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)  # the adapter passes masks of its own
    return name


GROUPED = _registered("jakiro_grouped", grouped_attention)
BATCH_INVARIANT = _registered("jakiro_batch_invariant", batch_invariant_attention)
