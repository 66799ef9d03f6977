"""Import of drafters of the Mixture of Attentions, as published (arXiv 2410.03804).

Keys and values of all target layers become the memory of a token: the layers attend to each other,
and their mean is projected to the target's width. Two decoder layers follow: one attends to the
tokens, and one attends to memory. Embeddings and head are the target's.
"""

from typing import Any

import torch
from torch import Tensor

from jakiro.drafter_settings import DrafterSettings
from jakiro.exchange.checkpoint import DraftCheckpoint, TensorTable
from jakiro.exchange.eagle import (
    LEVELS,
    LayerConfig,
    layer_config,
    take_attention,
    take_cross_attention,
    take_experts,
)
from jakiro.exchange.plan import ImportPlan
from jakiro.target.attention_shape import AttentionShape, HeadShape
from jakiro.utils.settings import validate_settings

_LAYERS, _OWN, _CROSS = "layer_self_attention.", "self_attention.", "cross_attention."
# The config does not say how many of the target's last layers run after the drafter.
_MOST_TAIL_LAYERS = 3


def read_mixture_of_attentions(checkpoint: DraftCheckpoint) -> ImportPlan:
    """Return the plan for importing a drafter of the Mixture of Attentions."""
    # The number of layers in the config is the target's.
    values = {key: value for key, value in checkpoint.config.items() if key != "num_hidden_layers"}
    config, table = layer_config(values, checkpoint.source), TensorTable(checkpoint)
    if not table.has("Ekv2E.weight"):
        raise table.unusable("a drafter with layer self-attention", "one without it")
    heads = _heads_of(table, config)
    inner = table.matrix(f"{_CROSS}mlp.gate_proj.weight")[0]
    settings = {
        "trunk": _take_trunk(table, config, heads),
        "memory": _take_memory(table, config, heads),
        "experts": {"num_experts": 1, "intermediate_size": inner, "combine": "sum"},
        "schedule": {"autoregressive_levels": LEVELS, "parallel_levels": 0},
        "norm_eps": config.rms_norm_eps,
        "draft_vocab_size": None,
    }
    _take_experts(table, config.hidden_size, inner)
    table.compare("embed_tokens.weight", "embeddings")
    table.compare("lm_head.weight", "head")
    table.finish()
    num_kv_heads = table.matrix("Ekv2E.weight")[1] // (2 * heads.head_dim)
    return ImportPlan(
        "Mixture of Attentions",
        validate_settings(DrafterSettings, settings, source=checkpoint.source),
        table,
        config.hidden_size,
        config.vocab_size,
        open_settings=(tuple({"tail_layers": count} for count in range(_MOST_TAIL_LAYERS + 1)),),
        head_shape=HeadShape(num_kv_heads, heads.head_dim, heads.head_dim),
    )


def _heads_of(table: TensorTable, config: LayerConfig) -> AttentionShape:
    """Return the geometry of both kinds of attention, which follows from their tensors."""
    dim = config.heads.head_dim
    counts = {
        part: [table.matrix(f"{part}self_attn.{name}_proj.weight")[0] / dim for name in "qk"]
        for part in (_OWN, _CROSS)
    }
    (num_heads, num_kv_heads), others = counts.values()
    is_whole = num_heads.is_integer() and num_kv_heads.is_integer()
    if [num_heads, num_kv_heads] != others or not is_whole or num_heads % num_kv_heads:
        raise table.unusable(
            f"the same number of heads of {dim} in self_attention and cross_attention",
            f"{num_heads:g} and {others[0]:g} query heads, {num_kv_heads:g} and {others[1]:g} "
            "key/value heads",
        )
    changes = {"num_heads": int(num_heads), "num_kv_heads": int(num_kv_heads)}
    return config.heads.model_copy(update=changes)


def _take_trunk(table: TensorTable, config: LayerConfig, heads: AttentionShape) -> dict[str, Any]:
    """Add both kinds of attention, and return the settings of the trunk."""
    hidden = config.hidden_size
    inner = table.matrix(f"{_OWN}mlp.gate_proj.weight")[0]
    own, cross, feed_forward = (
        f"trunk.{part}" for part in ("self_attention", "cross_attention", "feed_forward")
    )
    table.take(f"{own}.norm.weight", {f"{_OWN}input_layernorm.weight": (hidden,)})
    bias = take_attention(table, f"{_OWN}self_attn.", heads, hidden, hidden)
    table.take(f"{feed_forward}.norm.weight", {f"{_OWN}post_attention_layernorm.weight": (hidden,)})
    shapes = {f"{_OWN}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    table.take(f"{feed_forward}.gate_up.weight", shapes, "rows joined", torch.cat)
    table.take(f"{feed_forward}.down.weight", {f"{_OWN}mlp.down_proj.weight": (hidden, inner)})
    for norm in ("norm", "memory_norm"):  # one norm for queries and memory
        table.take(f"{cross}.{norm}.weight", {f"{_CROSS}input_layernorm.weight": (hidden,)})
    take_cross_attention(table, f"{_CROSS}self_attn.", heads, hidden)
    return {
        "kind": "moa",
        "mlp_width": inner,
        "attention_bias": bias,
        "qk_norm": table.has(f"{_OWN}self_attn.q_norm.weight"),
        "rope": config.rope.model_dump(),
        **heads.model_dump(),
    }


def _take_experts(table: TensorTable, hidden: int, inner: int) -> None:
    """Add the feed-forward network after cross-attention."""
    norm = f"{_CROSS}post_attention_layernorm.weight"
    table.take("experts.norm.weight", {norm: (hidden,)})
    take_experts(table, [f"{_CROSS}mlp."], hidden, inner)
    table.zeros("experts.router.weight", (1, hidden))


def _take_memory(table: TensorTable, config: LayerConfig, heads: AttentionShape) -> dict[str, Any]:
    """Add layer self-attention and the projection after it, and return the settings of memory."""
    width, hidden = table.matrix("Ekv2E.weight")[1], config.hidden_size
    rows = table.matrix(f"{_LAYERS}self_attn.q_proj.weight")[0]
    if width % (2 * heads.head_dim) or rows % (2 * heads.num_heads):
        raise table.unusable(
            f"keys and values in heads of {heads.head_dim}, and {heads.num_heads} heads of an even "
            "size in layer_self_attention",
            f"Ekv2E with {width} columns, and {rows} rows of queries",
        )
    inner = table.matrix(f"{_LAYERS}mlp.gate_proj.weight")[0]
    order = _StateOrder(width, heads.head_dim)
    _take_layer_attention(table, order, heads.num_heads, rows // heads.num_heads)
    _take_layer_mlp(table, order, inner)
    ours = "memory_encoder.output"
    shape = {"Ekv2E.weight": (hidden, width)}
    table.take(f"{ours}.weight", shape, "columns reordered", order.columns)
    table.take(f"{ours}.bias", {"Ekv2E.bias": (hidden,)})
    return {
        "source": "kv",
        "num_heads": heads.num_heads,
        "head_dim": rows // heads.num_heads,
        "mlp_width": inner,
        "rope_theta": heads.rope_theta,
        "rope": config.rope.model_dump(),
    }


class _StateOrder:
    """The order of the channels of a layer's keys and values.

    Published drafters read the key and the value of each head side by side. This project reads all
    keys, and then all values.
    """

    def __init__(self, width: int, head_dim: int) -> None:
        self.width = width
        heads = torch.arange(width).view(-1, 2, head_dim)
        self._published = heads.transpose(0, 1).flatten()  # of each of our channels

    def channels(self, parts: list[Tensor]) -> Tensor:
        """Return a vector, or the rows of a matrix, in the order of this project."""
        return parts[0][self._published].contiguous()

    def columns(self, parts: list[Tensor]) -> Tensor:
        """Return matrices, joined along their rows, with columns in the order of this project."""
        return torch.cat(parts)[:, self._published].contiguous()


def _take_layer_attention(
    table: TensorTable, order: _StateOrder, num_heads: int, head_dim: int
) -> None:
    """Add layer self-attention, with one head of keys and values for each query head."""
    published, ours = f"{_LAYERS}self_attn.", "memory_encoder.layer_attention"
    kv_rows = table.matrix(f"{published}k_proj.weight")[0]
    if kv_rows % head_dim or num_heads % (kv_rows // head_dim):
        raise table.unusable(
            f"a divisor of {num_heads} heads of {head_dim} for the keys of layer_self_attention",
            f"{kv_rows} rows",
        )
    group = num_heads * head_dim // kv_rows

    def repeated(part: Tensor) -> Tensor:
        heads = part.view(-1, head_dim, order.width)
        return heads.repeat_interleave(group, dim=0).flatten(0, 1)

    def joined(parts: list[Tensor]) -> Tensor:
        query, key, value = parts
        return order.columns([query, repeated(key), repeated(value)])

    rows = {"q": num_heads * head_dim, "k": kv_rows, "v": kv_rows}
    shapes = {f"{published}{name}_proj.weight": (rows[name], order.width) for name in "qkv"}
    how = "rows joined, one key and value for each query head, columns reordered"
    table.take(f"{ours}.query_key_value.weight", shapes, how, joined)
    shape = {f"{published}o_proj.weight": (order.width, rows["q"])}
    table.take(f"{ours}.output.weight", shape, "rows reordered", order.channels)
    norm = {f"{_LAYERS}input_layernorm.weight": (order.width,)}
    table.take(f"{ours}.attention_norm.weight", norm, "reordered", order.channels)


def _take_layer_mlp(table: TensorTable, order: _StateOrder, inner: int) -> None:
    """Add the feed-forward network of layer self-attention."""
    published, ours = f"{_LAYERS}mlp.", "memory_encoder.layer_attention"
    shapes = {f"{published}{name}_proj.weight": (inner, order.width) for name in ("gate", "up")}
    table.take(f"{ours}.gate_up.weight", shapes, "rows joined, columns reordered", order.columns)
    shape = {f"{published}down_proj.weight": (order.width, inner)}
    table.take(f"{ours}.down.weight", shape, "rows reordered", order.channels)
    norm = {f"{_LAYERS}post_attention_layernorm.weight": (order.width,)}
    table.take(f"{ours}.mlp_norm.weight", norm, "reordered", order.channels)
