"""The decoder layer of published drafters, and import of those that consist of such a layer.

These are EAGLE-1, EAGLE-2 (arXiv 2401.15077, 2406.16858), HASS (2408.15766) and Jakiro. Their layer
reads the embedding of the next token and the feature of a token, joined by a matrix, and has no
norm before its attention. Jakiro as published (arXiv 2502.06282) has two experts instead of one
feed-forward network.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jakiro.drafter_settings import DrafterSettings, TrunkSettings
from jakiro.exchange.checkpoint import DraftCheckpoint
from jakiro.exchange.mapping import (
    Row,
    TensorTable,
    attention_rows,
    cannot_import,
    expert_rows,
    zeros,
)
from jakiro.exchange.plan import ImportPlan
from jakiro.target.attention_shape import AttentionShape
from jakiro.utils.rope import RopeSettings
from jakiro.utils.settings import validate_settings

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


def attention_settings(
    table: TensorTable, prefix: str, config: LayerConfig, heads: AttentionShape
) -> dict[str, Any]:
    """Return the settings of the trunk that follow from the tensors of its self-attention."""
    bias = "all" if table.has(f"{prefix}o_proj.bias") else "qkv"
    return {
        "attention_bias": bias if table.has(f"{prefix}q_proj.bias") else "none",
        "qk_norm": table.has(f"{prefix}q_norm.weight"),
        "rope": config.rope.model_dump(),
        **heads.model_dump(),
    }


def read_eagle(checkpoint: DraftCheckpoint) -> ImportPlan:
    """Return the plan for importing a drafter of EAGLE-1, EAGLE-2 or HASS."""
    config, table = layer_config(checkpoint.config, checkpoint.source), TensorTable(checkpoint)
    hidden, inner = config.hidden_size, table.matrix(f"{_LAYER}mlp.gate_proj.weight")[0]
    table.take(expert_rows([f"{_LAYER}mlp."], hidden, inner))
    table.take([zeros("experts.router.weight", 1, hidden)])
    return _plan("EAGLE-1, EAGLE-2 or HASS", table, config, num_experts=1, inner=inner)


def read_published_jakiro(checkpoint: DraftCheckpoint) -> ImportPlan:
    """Return the plan for importing a drafter of the published Jakiro."""
    config, table = layer_config(checkpoint.config, checkpoint.source), TensorTable(checkpoint)
    experts, router = f"{_LAYER}mlp_moe.experts.", f"{_LAYER}mlp_moe.gate.weight"
    number = len([name for name in checkpoint.tensors if name.endswith("gate_proj.weight")])
    if table.matrix(router)[0] != 2 * number or table.has(f"{experts}0.fc.weight"):
        raise table.unusable(
            "Jakiro as published, with two rows of the router per expert",
            "Jakiro*, whose experts have neither gates nor weights",
        )
    hidden = config.hidden_size  # also the experts' inner width, whatever the config says
    table.take(expert_rows([f"{experts}{e}." for e in range(number)], hidden, hidden))
    table.take([Row("experts.router.weight", {router: (2 * number, hidden)})])
    return _plan("Jakiro as published", table, config, number, hidden, parallel_levels=1)


def _plan(
    family: str,
    table: TensorTable,
    config: LayerConfig,
    num_experts: int,
    inner: int,
    parallel_levels: int = 0,
) -> ImportPlan:
    """Return the plan after the experts were taken."""
    settings = {
        "trunk": {
            "kind": "feedback",
            "input_norms": any(map(table.has, _INPUT_NORMS.values())),
            "input_bias": table.has("fc.bias"),
            "attention_norm": table.has(f"{_LAYER}input_layernorm.weight"),
            "first_position": False,
            **attention_settings(table, f"{_LAYER}self_attn.", config, config.heads),
        },
        "experts": {"num_experts": num_experts, "intermediate_size": inner, "combine": "sum"},
        "schedule": {
            "autoregressive_levels": LEVELS - parallel_levels,
            "parallel_levels": parallel_levels,
        },
        "norm_eps": config.rms_norm_eps,
        "draft_vocab_size": None,
    }
    source, hidden = table.checkpoint.source, config.hidden_size
    validated = validate_settings(DrafterSettings, settings, source=source)
    table.take(_layer_rows(validated.trunk, hidden))
    table.compare("embed_tokens.weight", "embeddings")
    table.compare("lm_head.weight", "head")
    table.finish()
    return ImportPlan(family, validated, table, hidden, config.vocab_size)


def _layer_rows(trunk: TrunkSettings, hidden: int) -> Iterator[Row]:
    """Yield everything but the experts."""
    ours = "trunk.feature_input"
    yield Row(f"{ours}.join.weight", {"fc.weight": (hidden, 2 * hidden)})
    if trunk.input_bias:
        yield Row(f"{ours}.join.bias", {"fc.bias": (hidden,)})
    norms = {f"{ours}.{norm}": name for norm, name in _INPUT_NORMS.items() if trunk.input_norms}
    if trunk.attention_norm:
        norms["trunk.self_attention.norm"] = f"{_LAYER}input_layernorm.weight"
    norms["experts.norm"] = f"{_LAYER}post_attention_layernorm.weight"
    yield from (Row(f"{norm}.weight", {name: (hidden,)}) for norm, name in norms.items())
    yield from attention_rows(f"{_LAYER}self_attn.", trunk, hidden, hidden)
