"""Import of EAGLE-1, EAGLE-2 (arXiv 2401.15077, 2406.16858) and HASS (2408.15766), and of Jakiro.

Their layer reads the embedding of the next token and the feature of a token, joined by a matrix,
and has no norm before its attention. Jakiro as published (arXiv 2502.06282) has two experts instead
of one feed-forward network.
"""

from typing import Any

from jakiro.drafter_settings import DrafterSettings
from jakiro.exchange.checkpoint import DraftCheckpoint
from jakiro.exchange.llama_layer import LayerConfig, layer_config, take_attention, take_experts
from jakiro.exchange.plan import ImportPlan
from jakiro.exchange.table import TensorTable
from jakiro.utils.settings import validate_settings

_LEVELS = 5  # depth of the trees that these projects draft by default
_LAYER = "layers.0."
_INPUT_NORMS = {
    "token_norm": "embedding_layernorm.weight",
    "feature_norm": "hidden_states_layernorm.weight",
}


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
            "autoregressive_levels": _LEVELS - parallel_levels,
            "parallel_levels": parallel_levels,
        },
        "norm_eps": config.rms_norm_eps,
        "draft_vocab_size": None,
    }
    validated = validate_settings(DrafterSettings, settings, source=table.checkpoint.source)
    return ImportPlan(family, validated, table, hidden, config.vocab_size)
