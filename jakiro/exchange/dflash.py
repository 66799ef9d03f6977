"""DFlash, JetSpec and DSpark (arXiv 2602.06036, 2606.18394, 2607.05147), imported and exported.

Their layers are those of Qwen3. In one pass, they read a block: the embedding of the last token and
those of a mask token. The keys and values of a layer are those of the block, preceded by those of
fused hidden states of the target at verified tokens, made with the same matrices. The rows of
JetSpec attend to earlier rows only; DSpark adds logits that depend on the token before, from two
tables (`jakiro.levels.PathTables`).

There are two layouts, with the same tensors: the one of z-lab, which is also exported, and whose
`target_layer_ids` count layers, so that layer i gives the hidden state i + 1; and the one of
speculators, which counts hidden states.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jakiro import __version__
from jakiro.drafter import JakiroDrafter
from jakiro.drafter_settings import DrafterSettings
from jakiro.exchange.checkpoint import DraftCheckpoint
from jakiro.exchange.eagle import attention_settings, layer_config
from jakiro.exchange.eagle3 import EXPORTED_BY, sort_by_token, take_head
from jakiro.exchange.eagle3_export import (
    Exported,
    Problem,
    ServedTarget,
    check_exportable,
    dropped_parts,
    exported_weights,
    layer_keys,
    older_rope_keys,
    other_settings,
)
from jakiro.exchange.mapping import (
    COPY,
    Row,
    TensorTable,
    Transform,
    attention_rows,
    expert_rows,
    feed_forward_rows,
    zeros,
)
from jakiro.exchange.plan import ImportPlan
from jakiro.utils.settings import flattened, merge, validate_settings
from jakiro.utils.wording import dtype_name

NAMES = {"fc.weight", "hidden_norm.weight", "norm.weight"}  # by which a block is recognized
_TABLES = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
# Settings of all these drafters: imports have them, and exports require them.
_SETTINGS = {
    "trunk": {"kind": "block", "block": {"reads_feature": False}, "attention_norm": True},
    "memory": {
        "source": "hidden",
        "layer_attention": False,
        "mixture": "none",
        "common_width": None,
        "output_bias": False,
    },
    "experts": {"num_experts": 1, "output_norm": "head"},
}
# Keys of configs, with the values for which a block drafter computes the same as without the key.
_WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    "add_swa_attention_sink_bias": (False,),
    "attention_mode": ("gqa", "mha"),
    "attention_sink_bias": (False,),
    "draft_adapter_rank": (0,),
    "draft_shift": (False,),
    "final_logit_softcapping": (0.0,),
    "input_embedding_scale": (1.0,),
    "is_neox_style": (True,),
    "markov_head_type": ("vanilla",),
    "output_multiplier": (1.0,),
    "projector_type": ("dflash", "dspark"),
    "shift_label": (False,),
    "topk_context": (0,),
    "use_aux_hidden_state": (True,),
    "use_swa": (False,),
}
_ONE_LAYER = {"num_hidden_layers": 1, "sliding_window": None, "use_sliding_window": False}
_LEFT_OUT = {  # starts of names
    "confidence_head.": "estimates of acceptance, which Jakiro takes from the draft distribution",
    "verifier_": "a part of the target, used in training only",
}


def block_rows(
    settings: DrafterSettings, hidden: int, vocab: int, num_states: int, sort: Transform = COPY
) -> Iterator[Row]:
    """Yield everything but the head with its draft vocabulary, and the router, which has no effect.

    Args:
        vocab: number of tokens of the target.
        num_states: number of hidden states that are fused.
        sort: transform of a matrix with a row for each token of the draft vocabulary.
    """
    trunk, schedule, inner = settings.trunk, settings.schedule, settings.experts.intermediate_size
    yield Row("memory_encoder.output.weight", {"fc.weight": (hidden, num_states * hidden)})
    norms = {"trunk.memory_norm": "hidden_norm", "head_norm": "norm"}
    for index in range(trunk.num_layers):
        layer, before = f"layers.{index}.", f"further_layers.{index - 1}." if index else ""
        attention, mlp = f"trunk.{before}self_attention", "experts"
        yield from attention_rows(f"{layer}self_attn.", trunk, hidden, hidden, attention)
        if index < trunk.num_layers - 1:
            mlp = f"trunk.further_layers.{index}.feed_forward"
            yield from feed_forward_rows(mlp, f"{layer}mlp.", hidden, inner)
        else:
            yield from expert_rows([f"{layer}mlp."], hidden, inner)
        norms[f"{attention}.norm"] = f"{layer}input_layernorm"
        norms[f"{mlp}.norm"] = f"{layer}post_attention_layernorm"
    for ours, norm in norms.items():
        yield Row(f"{ours}.weight", {f"{norm}.weight": (hidden,)})
    if schedule.path == "tables":
        rank, size = schedule.path_rank or 0, settings.draft_vocab_size
        drafted = size if isinstance(size, int) else vocab
        yield Row("path_tables.of_parent.weight", {_TABLES[0]: (vocab, rank)})
        yield Row("path_tables.of_child.weight", {_TABLES[1]: (drafted, rank)}, sort)


def read_dflash(checkpoint: DraftCheckpoint) -> ImportPlan:
    """Return the plan for importing a drafter of DFlash, JetSpec or DSpark."""
    table, values = TensorTable(checkpoint), block_values(checkpoint.config)
    _check_values(table, values)
    config = layer_config(values | _ONE_LAYER, checkpoint.source)
    hidden, vocab = config.hidden_size, config.vocab_size
    is_nested = "transformer_layer_config" in checkpoint.config
    ids = _hidden_states(table, values, hidden, is_nested)
    stated = [values[key] for key in ("is_causal", "causal", "causal_head") if key in values]
    is_causal, is_dspark = bool(stated and stated[0]), table.has(_TABLES[0])
    reads_anchor = _reads_anchor(values, is_dspark)
    num_drafted = _whole(table, values, "block_size", least=3, most=16) - (not reads_anchor)
    block = {
        "causal": is_causal,
        "predicts_from": "all" if reads_anchor else "masks",
        "mask_token": _whole(table, values, "mask_token_id", most=vocab - 1),
    }
    fields: dict[str, Any] = {
        "trunk": {
            "block": block,
            "num_layers": _whole(table, values, "num_hidden_layers", least=1),
            **attention_settings(table, "layers.0.self_attn.", config, config.heads),
        },
        "memory": {"layers": ids},
        "experts": {
            "intermediate_size": table.matrix("layers.0.mlp.gate_proj.weight")[0],
            "combine": "sum",
            "head": "own" if table.has("d2t") else "target",
        },
        "schedule": {
            "autoregressive_levels": 1,
            "parallel_levels": num_drafted - 1,
            "parallel_heads": "masks",
            "path": "tables" if is_dspark else "none",
            "path_rank": table.matrix(_TABLES[0])[1] if is_dspark else None,
        },
        "norm_eps": config.rms_norm_eps,
        "draft_vocab_size": _take_vocabulary(table, hidden, vocab, values.get("draft_vocab_size")),
    }
    merged = merge(_SETTINGS, fields)
    settings = validate_settings(DrafterSettings, merged, source=checkpoint.source)
    table.take(block_rows(settings, hidden, vocab, len(ids), sort_by_token(table)))
    table.take([zeros("experts.router.weight", 1, hidden)])
    for name in checkpoint.tensors:
        for start, reason in _LEFT_OUT.items():
            if name.startswith(start):
                table.drop(name, reason)
    if is_dspark and table.has("mask_embedding"):
        table.drop("mask_embedding", "DSpark reads the mask token's embedding")
    table.compare("embed_tokens.weight", "embeddings")
    table.finish()
    family = "DSpark" if is_dspark else "JetSpec" if is_causal else "DFlash"
    layout = "speculators" if is_nested else "z-lab"
    return ImportPlan(f"{family}, layout of {layout}", settings, table, hidden, vocab, (ids,))


def block_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return all values of a config; those of its part for the block replace others."""
    parts = (config.get("transformer_layer_config"), config, config.get("dflash_config"))
    given = [part for part in parts if isinstance(part, Mapping)]
    return {key: value for part in given for key, value in part.items() if value is not None}


def _check_values(table: TensorTable, values: Mapping[str, Any]) -> None:
    """Raise an error if a config has what the settings of a block cannot express."""
    for name, allowed in _WITHOUT_EFFECT.items():
        if name in values and values[name] not in allowed:
            raise table.unusable(f"{name} {allowed[0]}", values[name])
    types = values.get("layer_types")
    has_window = bool(values.get("use_sliding_window") and values.get("sliding_window"))
    if has_window if types is None else "sliding_attention" in types:
        raise table.unusable("layers that attend to all tokens", "layers with a sliding window")
    if (width := values.get("target_hidden_size")) not in (None, values.get("hidden_size")):
        raise table.unusable("a drafter as wide as its target", f"target_hidden_size {width}")


def _whole(
    table: TensorTable, values: Mapping[str, Any], name: str, least: int = 0, most: int = 2**31
) -> int:
    """Return a whole number from a config."""
    got = values.get(name)
    if type(got) is not int or not least <= got <= most:
        limit = f"{least} to {most}" if most < 2**31 else f"at least {least}"
        raise table.unusable(f"{name} of {limit} in config.json", got)
    return got


def _hidden_states(
    table: TensorTable, values: Mapping[str, Any], hidden: int, is_nested: bool
) -> tuple[int, ...]:
    """Return the indices of the hidden states that are fused, in this order."""
    name, offset = ("aux_hidden_state_layer_ids", 0) if is_nested else ("target_layer_ids", 1)
    given, columns = values.get(name), table.matrix("fc.weight")[1]
    ids = list(given) if isinstance(given, Sequence) else []
    is_list = len(ids) > 1 and all(type(index) is int for index in ids)
    if not is_list or ids != sorted(set(ids)) or ids[0] + offset < 1:
        raise table.unusable(f"{name} with several ascending indices of layers", given)
    if columns != len(ids) * hidden:
        raise table.unusable(f"fc.weight for {len(ids)} states of size {hidden}", columns)
    return tuple(index + offset for index in ids)


def _reads_anchor(values: Mapping[str, Any], is_dspark: bool) -> bool:
    """Return whether the row of the last token predicts a token, too.

    Configs that do not say so may have the number of drafted tokens, which then equals the number
    of rows.
    """
    if "sample_from_anchor" in values:
        return bool(values["sample_from_anchor"])
    if "dspark_bonus_anchor" in values:
        return not values["dspark_bonus_anchor"]
    methods = (values.get("speculators_config") or {}).get("proposal_methods") or [{}]
    count = methods[0].get("speculative_tokens")
    return is_dspark if count is None else count == values.get("block_size")


def _take_vocabulary(table: TensorTable, hidden: int, vocab: int, stated: object) -> int | None:
    """Add the head of a draft vocabulary, and return its size; None if it has all tokens."""
    if table.has("d2t"):
        return take_head(table, hidden, vocab, stated)
    if stated not in (None, vocab):
        raise table.unusable(f"d2t for the draft_vocab_size {stated}", "none")
    table.compare("lm_head.weight", "head")
    if table.has("t2d"):
        table.drop("t2d", "all tokens can be drafted")
    return None


def export_dflash(drafter: JakiroDrafter, facts: ServedTarget) -> Exported:
    """Return a block drafter in the layout of DFlash, or of DSpark if it has its tables."""
    remedy = "train a drafter with these settings; docs/guides/exchange.md has all of them"
    check_exportable(_problems(drafter), "as DFlash", remedy)
    settings, record = drafter.config.settings, drafter.config.target_record
    num_states = len(_states_of(drafter))
    rows = block_rows(settings, record.hidden_size, record.vocab_size, num_states)
    weights, dropped = exported_weights(drafter, rows), tuple(dropped_parts(drafter))
    return Exported(weights, _config(drafter, facts), dropped)


def _states_of(drafter: JakiroDrafter) -> tuple[int, ...]:
    source = drafter.state_sources.memory
    return () if source is None else source.layers


def _problems(drafter: JakiroDrafter) -> Iterator[Problem]:
    """Yield the settings that the layout does not have."""
    settings, record = drafter.config.settings, drafter.config.target_record
    trunk, path = settings.trunk, settings.schedule.path
    yield from other_settings(settings, dict(flattened(_SETTINGS)) | {"trunk.qk_norm": True})
    if not trunk.is_block:
        return
    if trunk.block.mask_token is None:
        yield Problem("drafter.trunk.block.mask_token of a token", None)
    if trunk.attention_bias == "qkv":
        yield Problem("drafter.trunk.attention_bias of none or all", "qkv")
    if path in ("embedding", "recurrent"):
        yield Problem("drafter.schedule.path of none", path)
    if path == "none" and trunk.block.predicts_from == "all":
        yield Problem("drafter.trunk.block.predicts_from of masks", "all")
    if (drafter.own_head is None) != (drafter.draft_ids is None):
        expected = "drafter.experts.head of own with a draft_vocab_size, or of target without one"
        yield Problem(expected, settings.experts.head)
    layers = _states_of(drafter)
    most = (record.num_hidden_states or 0) - 2  # the last one is after the target's final norm
    is_read_alike = len(layers) > 1 and list(layers) == sorted(set(layers))
    if not is_read_alike or layers[0] < 1 or layers[-1] > most:
        yield Problem(f"several ascending drafter.memory.layers from 1 to {most}", list(layers))


def _config(drafter: JakiroDrafter, facts: ServedTarget) -> dict[str, Any]:
    settings, record = drafter.config.settings, drafter.config.target_record
    trunk, schedule = settings.trunk, settings.schedule
    reads_anchor = trunk.block.predicts_from == "all"
    block = {
        "target_layer_ids": [state - 1 for state in _states_of(drafter)],
        "mask_token_id": trunk.block.mask_token,
        "causal": trunk.block.causal,
        "causal_head": trunk.block.causal,  # the name in JetSpec's own loader
    }
    config = layer_keys(drafter, facts.max_position) | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": trunk.num_layers,
        "num_target_layers": (record.num_hidden_states or 0) - 1,
        "layer_types": ["full_attention"] * trunk.num_layers,
        "use_sliding_window": False,
        "attention_bias": trunk.attention_bias == "all",
        "is_causal": trunk.block.causal,
        "block_size": schedule.depth + (not reads_anchor),
        "dflash_config": block,
        "torch_dtype": dtype_name(drafter.dtype),
        EXPORTED_BY: f"jakiro {__version__}",
    }
    config |= older_rope_keys(config["rope_parameters"])
    if drafter.draft_ids is not None:
        config["draft_vocab_size"] = len(drafter.draft_ids)
    if schedule.path == "tables":
        config |= block | {
            "architectures": ["Qwen3DSparkModel"],
            "markov_rank": schedule.path_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": False,
            "sample_from_anchor": reads_anchor,
            "dspark_bonus_anchor": not reads_anchor,
        }
    return config
