"""The decoder layer of published drafters: its config, and the tensors of its two halves."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jakiro.exchange.table import TensorTable, cannot_import, rows_joined, stacked_transposed
from jakiro.target.attention_shape import AttentionShape
from jakiro.utils.rope import RopeSettings
from moa import AttentionBias

_DEFAULT_BASE = 10_000.0  # of transformers' Llama; never the target's
_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}


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
        return AttentionShape(
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads or self.num_attention_heads,
            head_dim=self.head_dim or self.hidden_size // self.num_attention_heads,
            rope_theta=self.rope_theta or self._theta_of_rope or _DEFAULT_BASE,
        )

    @property
    def _theta_of_rope(self) -> float | None:
        both = (self.rope_scaling or {}), (self.rope_parameters or {})
        return next((own["rope_theta"] for own in both if own.get("rope_theta")), None)

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
        rows_joined,
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
        rows_joined,
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
        rows_joined,
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
        rows_joined,
    )
    table.take(
        "experts.down",
        {f"{prefix}down_proj.weight": (hidden, inner) for prefix in prefixes},
        "transposed",
        stacked_transposed,
    )
