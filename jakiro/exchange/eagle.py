"""The decoder layer of published drafters, and import of those that consist of such a layer.

These are EAGLE-1, EAGLE-2 (arXiv 2401.15077, 2406.16858), HASS (2408.15766) and Jakiro. Their layer
reads the embedding of the next token and the feature of a token, joined by a matrix, and has no
norm before its attention. Jakiro as published (arXiv 2502.06282) has two experts instead of one
feed-forward network.
"""

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jakiro.drafter_settings import DrafterSettings
from jakiro.exchange.checkpoint import DraftCheckpoint, TensorTable, cannot_import
from jakiro.exchange.plan import ImportPlan
from jakiro.target.attention_shape import AttentionShape
from jakiro.utils.rope import RopeSettings
from jakiro.utils.settings import validate_settings
from moa import AttentionBias

_DEFAULT_BASE = 10_000.0  # of transformers' Llama; never the target's
_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}
LEVELS = 5  # depth of the trees that these projects draft by default
_LAYER = "layers.0."
_INPUT_NORMS = {
    "token_norm": "embedding_layernorm.weight",
    "feature_norm": "hidden_states_layernorm.weight",
}


class LayerConfig(BaseModel):
    """The keys of a published drafter's config that determine its layer; others are ignored.

    Attributes:
        rope_theta: base of the rotary embedding; None for the base in `rope_parameters`, or 10000.
        rope_scaling: change of the rotary embedding for long contexts, as older configs name it.
        rope_parameters: kind and parameters of the rotary embedding, as newer configs name them.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    hidden_size: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int | None = Field(None, ge=1)
    head_dim: int | None = Field(None, ge=2)
    num_hidden_layers: int = 1
    rms_norm_eps: float = Field(1e-6, gt=0)
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    max_position_embeddings: int | None = None
    hidden_act: str = "silu"
    partial_rotary_factor: float = 1.0
    sliding_window: int | None = None
    use_sliding_window: bool = True
    logit_scale: float = 1.0

    @property
    def heads(self) -> AttentionShape:
        """The geometry of self-attention."""
        scalings = (self.rope_scaling or {}, self.rope_parameters or {})
        theta = next((part["rope_theta"] for part in scalings if part.get("rope_theta")), None)
        return AttentionShape(
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads or self.num_attention_heads,
            head_dim=self.head_dim or self.hidden_size // self.num_attention_heads,
            rope_theta=self.rope_theta or theta or _DEFAULT_BASE,
        )

    @property
    def scaling(self) -> dict[str, Any]:
        """The parameters of the rotary embedding, under the names of transformers."""
        return self.rope_scaling or self.rope_parameters or {}

    @property
    def rope(self) -> RopeSettings:
        """The change of the rotary embedding for long contexts."""
        given = self.scaling.keys() & RopeSettings.model_fields.keys()
        values = {name: self.scaling[name] for name in given}
        values["kind"] = self.scaling.get("rope_type", self.scaling.get("type", "default"))
        if values["kind"] in ("llama3", "yarn"):
            values.setdefault("original_max_position_embeddings", self.max_position_embeddings)
        return RopeSettings.model_validate(values)


def layer_config(values: Mapping[str, Any], source: str) -> LayerConfig:
    """Return the config of a published drafter's layer."""
    try:
        config = LayerConfig.model_validate(dict(values))
        heads, _ = config.heads, config.rope
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "combination of values"
        raise cannot_import(source, f"a usable {name} in config.json", first["msg"]) from error
    if others := sorted(config.scaling.keys() - _ROPE_KEYS - RopeSettings.model_fields.keys()):
        raise cannot_import(source, "known parameters of rope_scaling", ", ".join(others))
    window = config.sliding_window if config.use_sliding_window else None
    rotated = config.scaling.get("partial_rotary_factor", config.partial_rotary_factor)
    checks: tuple[tuple[str, object, object], ...] = (
        ("num_hidden_layers", config.num_hidden_layers, 1),
        ("hidden_act", config.hidden_act, "silu"),
        ("partial_rotary_factor", rotated, 1.0),
        ("sliding_window", window, None),
        ("logit_scale", config.logit_scale, 1.0),
        ("remainder of query heads over key/value heads", heads.num_heads % heads.num_kv_heads, 0),
    )
    for name, got, possible in checks:
        if got != possible:
            raise cannot_import(source, f"{name} {possible}", got)
    return config


def take_attention(
    table: TensorTable, prefix: str, heads: AttentionShape, width: int, hidden: int
) -> AttentionBias:
    """Add self-attention, and return which of its projections have a bias."""
    sizes = {"q": heads.num_heads, "k": heads.num_kv_heads, "v": heads.num_kv_heads}
    rows = {f"{prefix}{name}_proj": count * heads.head_dim for name, count in sizes.items()}
    ours = "trunk.self_attention"
    table.take(
        f"{ours}.project.weight",
        {f"{name}.weight": (count, width) for name, count in rows.items()},
        "rows joined",
        torch.cat,
    )
    table.take(
        f"{ours}.output.weight",
        {f"{prefix}o_proj.weight": (hidden, heads.num_heads * heads.head_dim)},
    )
    for name in ("query", "key"):
        if table.has(norm := f"{prefix}{name[0]}_norm.weight"):
            table.take(f"{ours}.{name}_norm.weight", {norm: (heads.head_dim,)})
    if not table.has(f"{prefix}q_proj.bias"):
        return "none"
    table.take(
        f"{ours}.project.bias",
        {f"{name}.bias": (count,) for name, count in rows.items()},
        "joined",
        torch.cat,
    )
    if not table.has(f"{prefix}o_proj.bias"):
        return "qkv"
    table.take(f"{ours}.output.bias", {f"{prefix}o_proj.bias": (hidden,)})
    return "all"


def take_cross_attention(
    table: TensorTable, prefix: str, heads: AttentionShape, hidden: int
) -> None:
    """Add cross-attention, without biases."""
    ours, rows = "trunk.cross_attention", heads.num_heads * heads.head_dim
    kv_rows = heads.num_kv_heads * heads.head_dim
    table.take(f"{ours}.query.weight", {f"{prefix}q_proj.weight": (rows, hidden)})
    table.take(
        f"{ours}.key_value.weight",
        {f"{prefix}{name}_proj.weight": (kv_rows, hidden) for name in "kv"},
        "rows joined",
        torch.cat,
    )
    table.take(f"{ours}.output.weight", {f"{prefix}o_proj.weight": (hidden, rows)})


def take_experts(table: TensorTable, prefixes: list[str], hidden: int, inner: int) -> None:
    """Add the feed-forward networks of one or several experts."""
    table.take(
        "experts.gate_up.weight",
        {
            f"{prefix}{name}_proj.weight": (inner, hidden)
            for prefix in prefixes
            for name in ("gate", "up")
        },
        "rows joined",
        torch.cat,
    )
    table.take(
        "experts.down",
        {f"{prefix}down_proj.weight": (hidden, inner) for prefix in prefixes},
        "transposed",
        lambda parts: torch.stack([part.T for part in parts]).contiguous(),
    )


def read_eagle(checkpoint: DraftCheckpoint) -> ImportPlan:
    """Return the plan for importing a drafter of EAGLE-1, EAGLE-2 or HASS."""
    config = layer_config(checkpoint.config, checkpoint.source)
    table = TensorTable(checkpoint)
    inner = table.matrix(f"{_LAYER}mlp.gate_proj.weight")[0]
    take_experts(table, [f"{_LAYER}mlp."], config.hidden_size, inner)
    table.zeros("experts.router.weight", (1, config.hidden_size))
    experts = {"num_experts": 1, "intermediate_size": inner, "combine": "sum"}
    return _plan("EAGLE-1, EAGLE-2 or HASS", table, config, experts, parallel_levels=0)


def read_published_jakiro(checkpoint: DraftCheckpoint) -> ImportPlan:
    """Return the plan for importing a drafter of the published Jakiro."""
    config = layer_config(checkpoint.config, checkpoint.source)
    table, hidden = TensorTable(checkpoint), config.hidden_size
    experts, router = f"{_LAYER}mlp_moe.experts.", f"{_LAYER}mlp_moe.gate.weight"
    number = len([name for name in checkpoint.tensors if name.endswith("gate_proj.weight")])
    if table.matrix(router)[0] != 2 * number or table.has(f"{experts}0.fc.weight"):
        raise table.unusable(
            "Jakiro as published, with two rows of the router per expert",
            "Jakiro*, whose experts have neither gates nor weights",
        )
    # The experts' inner width is the hidden size, whatever the config says.
    take_experts(table, [f"{experts}{e}." for e in range(number)], hidden, hidden)
    table.take("experts.router.weight", {router: (2 * number, hidden)})
    settings = {"num_experts": number, "intermediate_size": hidden, "combine": "sum"}
    return _plan("Jakiro as published", table, config, settings, parallel_levels=1)


def _plan(
    family: str,
    table: TensorTable,
    config: LayerConfig,
    experts: dict[str, Any],
    parallel_levels: int,
) -> ImportPlan:
    hidden, heads = config.hidden_size, config.heads
    ours = "trunk.feature_input"
    table.take(f"{ours}.join.weight", {"fc.weight": (hidden, 2 * hidden)})
    has_bias = table.has("fc.bias")
    if has_bias:
        table.take(f"{ours}.join.bias", {"fc.bias": (hidden,)})
    has_norms = any(map(table.has, _INPUT_NORMS.values()))
    if has_norms:
        for norm, name in _INPUT_NORMS.items():
            table.take(f"{ours}.{norm}.weight", {name: (hidden,)})
    before = f"{_LAYER}input_layernorm.weight"
    if table.has(before):
        table.take("trunk.self_attention.norm.weight", {before: (hidden,)})
    bias = take_attention(table, f"{_LAYER}self_attn.", heads, hidden, hidden)
    table.take("experts.norm.weight", {f"{_LAYER}post_attention_layernorm.weight": (hidden,)})
    table.compare("embed_tokens.weight", "embeddings")
    table.compare("lm_head.weight", "head")
    table.finish()
    settings = {
        "trunk": {
            "kind": "feedback",
            "input_norms": has_norms,
            "input_bias": has_bias,
            "attention_norm": table.has(before),
            "attention_bias": bias,
            "qk_norm": table.has(f"{_LAYER}self_attn.q_norm.weight"),
            "first_position": False,
            "rope": config.rope.model_dump(),
            **heads.model_dump(),
        },
        "experts": experts,
        "schedule": {
            "autoregressive_levels": LEVELS - parallel_levels,
            "parallel_levels": parallel_levels,
        },
        "norm_eps": config.rms_norm_eps,
        "draft_vocab_size": None,
    }
    validated = validate_settings(DrafterSettings, settings, source=table.checkpoint.source)
    return ImportPlan(family, validated, table, hidden, config.vocab_size)
