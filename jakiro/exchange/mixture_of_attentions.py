"""Import of drafters of the Mixture of Attentions, as published (arXiv 2410.03804).

Keys and values of all target layers become the memory of a token: the layers attend to each other,
and their mean is projected to the target's width. Two decoder layers follow: one attends to the
tokens, and one attends to memory. Embeddings and head are the target's.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from jakiro.drafter_settings import DrafterSettings
from jakiro.exchange.checkpoint import DraftCheckpoint
from jakiro.exchange.eagle import LEVELS, LayerConfig, attention_settings, layer_config
from jakiro.exchange.mapping import (
    JOIN_ROWS,
    Row,
    TensorTable,
    Transform,
    attention_rows,
    expert_rows,
    feed_forward_rows,
    zeros,
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
    heads, source = _heads_of(table, config), checkpoint.source
    trunk = {
        "kind": "moa",
        "mlp_width": table.matrix(f"{_OWN}mlp.gate_proj.weight")[0],
        **attention_settings(table, f"{_OWN}self_attn.", config, heads),
    }
    inner = table.matrix(f"{_CROSS}mlp.gate_proj.weight")[0]
    values = {
        "trunk": trunk,
        "memory": _take_memory(table, config, heads),
        "experts": {"num_experts": 1, "intermediate_size": inner, "combine": "sum"},
        "schedule": {"autoregressive_levels": LEVELS, "parallel_levels": 0},
        "norm_eps": config.rms_norm_eps,
        "draft_vocab_size": None,
    }
    settings = validate_settings(DrafterSettings, values, source=source)
    table.take(_trunk_rows(settings, heads, config.hidden_size))
    table.compare("embed_tokens.weight", "embeddings")
    table.compare("lm_head.weight", "head")
    table.finish()
    num_kv_heads = table.matrix("Ekv2E.weight")[1] // (2 * heads.head_dim)
    return ImportPlan(
        "Mixture of Attentions",
        settings,
        table,
        config.hidden_size,
        config.vocab_size,
        open_settings=(tuple({"tail_layers": count} for count in range(_MOST_TAIL_LAYERS + 1)),),
        head_shape=HeadShape(num_kv_heads, heads.head_dim, heads.head_dim),
    )


def _heads_of(table: TensorTable, config: LayerConfig) -> AttentionShape:
    """Return the geometry of both kinds of attention, which follows from the tensors of one."""
    rows = (table.matrix(f"{_OWN}self_attn.{name}_proj.weight")[0] for name in "qk")
    num_heads, num_kv_heads = (count // config.heads.head_dim for count in rows)
    changes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    return config.heads.model_copy(update=changes)


def _trunk_rows(settings: DrafterSettings, heads: AttentionShape, hidden: int) -> Iterator[Row]:
    """Yield both kinds of attention and the feed-forward networks after them."""
    inner = settings.trunk.mlp_width or 0
    mlp, cross = "trunk.feed_forward", "trunk.cross_attention"
    yield from feed_forward_rows(mlp, f"{_OWN}mlp.", hidden, inner)
    yield from attention_rows(f"{_OWN}self_attn.", settings.trunk, hidden, hidden)
    size, kv_size = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    yield Row(f"{cross}.query.weight", {f"{_CROSS}self_attn.q_proj.weight": (size, hidden)})
    shapes = {f"{_CROSS}self_attn.{name}_proj.weight": (kv_size, hidden) for name in "kv"}
    yield Row(f"{cross}.key_value.weight", shapes, JOIN_ROWS)
    yield Row(f"{cross}.output.weight", {f"{_CROSS}self_attn.o_proj.weight": (hidden, size)})
    norms = {
        "trunk.self_attention.norm": f"{_OWN}input_layernorm",
        f"{mlp}.norm": f"{_OWN}post_attention_layernorm",
        f"{cross}.norm": f"{_CROSS}input_layernorm",  # one norm for queries and memory
        f"{cross}.memory_norm": f"{_CROSS}input_layernorm",
        "experts.norm": f"{_CROSS}post_attention_layernorm",
    }
    for ours, norm in norms.items():
        yield Row(f"{ours}.weight", {f"{norm}.weight": (hidden,)})
    yield from expert_rows([f"{_CROSS}mlp."], hidden, settings.experts.intermediate_size)
    yield zeros("experts.router.weight", 1, hidden)


def _take_memory(table: TensorTable, config: LayerConfig, heads: AttentionShape) -> dict[str, Any]:
    """Add layer self-attention and the projection after it, and return the settings of memory."""
    width, hidden = table.matrix("Ekv2E.weight")[1], config.hidden_size
    inner = table.matrix(f"{_LAYERS}mlp.gate_proj.weight")[0]
    rows, kv_rows = (table.matrix(f"{_LAYERS}self_attn.{name}_proj.weight")[0] for name in "qk")
    dim = rows // heads.num_heads
    if width % (2 * heads.head_dim) or kv_rows % dim or rows % kv_rows:
        raise table.unusable(
            f"keys and values in heads of {heads.head_dim}, and a divisor of {heads.num_heads} "
            f"heads of {dim} for the keys of layer_self_attention",
            f"Ekv2E with {width} columns, and {kv_rows} rows of keys",
        )
    # Published drafters read the key and the value of each head side by side. This project reads
    # all keys, and then all values. These are the published channels in our order.
    channels = torch.arange(width).view(-1, 2, heads.head_dim).transpose(0, 1).flatten()
    sizes = {"q": rows, "k": kv_rows, "v": kv_rows}
    table.take(_memory_rows(channels, sizes, dim, inner))
    columns = Transform("columns reordered", lambda parts: parts[0][:, channels].contiguous())
    output = "memory_encoder.output"
    table.take([Row(f"{output}.weight", {"Ekv2E.weight": (hidden, width)}, columns)])
    table.take([Row(f"{output}.bias", {"Ekv2E.bias": (hidden,)})])
    return {
        "source": "kv",
        "num_heads": heads.num_heads,
        "head_dim": dim,
        "mlp_width": inner,
        "rope_theta": heads.rope_theta,
        "rope": config.rope.model_dump(),
    }


def _memory_rows(
    channels: Tensor, sizes: dict[str, int], head_dim: int, inner: int
) -> Iterator[Row]:
    """Yield layer self-attention, with one head of keys and values for each query head.

    Args:
        sizes: rows of the published matrices of queries, keys and values.
    """
    ours, width = "memory_encoder.layer_attention", len(channels)

    def columns(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts)[:, channels].contiguous()

    def repeated(part: Tensor) -> Tensor:
        heads = part.view(-1, head_dim, width)
        return heads.repeat_interleave(sizes["q"] // len(part), dim=0).flatten(0, 1)

    repeat = Transform(
        "rows joined, one key and value for each query head, columns reordered",
        lambda parts: columns([parts[0], *map(repeated, parts[1:])]),
    )
    reorder = Transform("rows reordered", lambda parts: parts[0][channels].contiguous())
    attention, mlp = f"{_LAYERS}self_attn.", f"{_LAYERS}mlp."
    shapes = {f"{attention}{name}_proj.weight": (size, width) for name, size in sizes.items()}
    yield Row(f"{ours}.query_key_value.weight", shapes, repeat)
    yield Row(f"{ours}.output.weight", {f"{attention}o_proj.weight": (width, sizes["q"])}, reorder)
    for norm, name in (("attention_norm", "input"), ("mlp_norm", "post_attention")):
        yield Row(f"{ours}.{norm}.weight", {f"{_LAYERS}{name}_layernorm.weight": (width,)}, reorder)
    shapes = {f"{mlp}{name}_proj.weight": (inner, width) for name in ("gate", "up")}
    join = Transform("rows joined, columns reordered", columns)
    yield Row(f"{ours}.gate_up.weight", shapes, join)
    yield Row(f"{ours}.down.weight", {f"{mlp}down_proj.weight": (width, inner)}, reorder)
