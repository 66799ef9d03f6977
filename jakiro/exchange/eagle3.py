"""Import of EAGLE-3 (arXiv 2503.01840) and EAGLE-3.1, in the layouts of EAGLE and of speculators.

The attention of their layer reads the normalized embedding and the normalized feature side by side.
The feature is fused from several hidden states of the target at verified tokens, and it is the
output of the layer before its final norm at drafted tokens. The head is the drafter's own.
"""

from typing import Any

import torch
from torch import Tensor

from jakiro.drafter_settings import DrafterSettings
from jakiro.exchange.checkpoint import DraftCheckpoint
from jakiro.exchange.eagle3_config import Eagle3Config
from jakiro.exchange.llama_layer import LayerConfig, layer_config, take_attention, take_experts
from jakiro.exchange.plan import ImportPlan
from jakiro.exchange.table import TensorTable
from jakiro.utils.settings import validate_settings

_LEVELS = 5  # depth of the trees that EAGLE drafts by default


def read_eagle3(checkpoint: DraftCheckpoint) -> ImportPlan:
    """Return the plan for importing a drafter of EAGLE-3."""
    table = TensorTable(checkpoint)
    values = Eagle3Config(checkpoint, table)
    config = layer_config(values.layer, checkpoint.source)
    num_states = _num_states(table, config.hidden_size)
    ids = values.hidden_states(num_states)
    stated = values.get("draft_vocab_size")
    trunk = _take_trunk(values, table, config, num_states)
    trunk["fusion_layers"] = ids[0] if ids else tuple(range(2, 2 + num_states))
    settings: dict[str, Any] = {
        "trunk": trunk,
        "experts": _take_experts(values, table, config.hidden_size),
        "schedule": {"autoregressive_levels": _LEVELS, "parallel_levels": 0},
        "norm_eps": config.rms_norm_eps,
        "draft_vocab_size": take_head(table, config.hidden_size, config.vocab_size, stated),
    }
    table.compare("embed_tokens.weight", "embeddings")
    table.finish()
    return ImportPlan(
        "EAGLE-3, layout of " + ("speculators" if values.is_nested else "EAGLE"),
        validate_settings(DrafterSettings, settings, source=checkpoint.source),
        table,
        config.hidden_size,
        config.vocab_size,
        ids,
        reads_default=not ids,
        open_settings=values.open_settings,
    )


def _take_trunk(
    values: Eagle3Config, table: TensorTable, config: LayerConfig, num_states: int
) -> dict[str, Any]:
    """Add everything before the feed-forward network, and return the settings of the trunk."""
    hidden, heads, layer = config.hidden_size, config.heads, _prefix(table)
    fusion_norm = _take_fusion(table, hidden, num_states)
    for ours, name in (("feature_norm", "hidden_norm"), ("token_norm", "input_layernorm")):
        table.take(f"trunk.feature_input.{ours}.weight", {f"{layer}{name}.weight": (hidden,)})
    return {
        "kind": "feedback",
        "input": "wide",
        "residual": "normed" if values.is_residual_normed else "feature",
        "input_bias": table.has("fc.bias"),
        "attention_norm": False,
        "attention_bias": take_attention(table, f"{layer}self_attn.", heads, 2 * hidden, hidden),
        "qk_norm": table.has(f"{layer}self_attn.q_norm.weight"),
        "first_position": False,
        "fusion_norm": fusion_norm,
        "rope": config.rope.model_dump(),
        **heads.model_dump(),
    }


def _take_experts(values: Eagle3Config, table: TensorTable, hidden: int) -> dict[str, Any]:
    """Add the feed-forward network and the norm after it, and return the settings of experts."""
    layer, output_norm = _prefix(table), values.output_norm
    inner = table.matrix(f"{layer}mlp.gate_proj.weight")[0]
    table.take("experts.norm.weight", {f"{layer}post_attention_layernorm.weight": (hidden,)})
    take_experts(table, [f"{layer}mlp."], hidden, inner)
    table.zeros("experts.router.weight", (1, hidden))
    if output_norm != "none":
        ours = "head_norm" if output_norm == "head" else "experts.output_norm"
        table.take(f"{ours}.weight", {"norm.weight": (hidden,)})
    return {
        "num_experts": 1,
        "intermediate_size": inner,
        "combine": "sum",
        "head": "own",
        "output_norm": output_norm,
    }


def _prefix(table: TensorTable) -> str:
    """Return the prefix of the names of the layer's tensors."""
    return "midlayer." if table.has("midlayer.hidden_norm.weight") else "layers.0."


def _take_fusion(table: TensorTable, hidden: int, num_states: int) -> str:
    """Add the matrix that fuses hidden states, and return the kind of the norm before it."""
    ours = "feature_encoder"
    table.take(f"{ours}.output.weight", {"fc.weight": (hidden, num_states * hidden)})
    if table.has("fc.bias"):
        table.take(f"{ours}.output.bias", {"fc.bias": (hidden,)})
    if table.has("fc_norm.0.weight"):
        names = {f"fc_norm.{index}.weight": (hidden,) for index in range(num_states)}
        table.take(f"{ours}.state_norm.weight", names, "stacked", torch.stack)
        return "each"
    if table.has("input_norm.weight"):
        table.take(
            f"{ours}.state_norm.weight",
            {"input_norm.weight": (num_states * hidden,)},
            "one row for each state",
            lambda parts: parts[0].view(num_states, hidden),
        )
        return "all"
    return "none"


def _num_states(table: TensorTable, hidden: int) -> int:
    """Return the number of hidden states that are fused."""
    columns = table.matrix("fc.weight")[1]
    if columns % hidden:
        raise table.unusable(
            f"fc.weight that fuses states of the drafter's hidden size {hidden}",
            f"{columns} columns, for a target of a different width",
        )
    return columns // hidden


def take_head(table: TensorTable, hidden: int, vocab: int, stated: object) -> int | None:
    """Add the head and the draft vocabulary, and return its size; None if it has all tokens.

    Args:
        vocab: number of tokens of the target.
    """
    count = table.matrix("lm_head.weight")[0]
    if stated not in (None, count):
        raise table.unusable(f"a head for the draft_vocab_size {stated}", f"one for {count} tokens")
    if table.has("d2t"):
        return _take_drafted(table, hidden, vocab, count)
    if count != vocab:
        raise table.unusable("d2t, or a head for all tokens", f"a head for {count} tokens")
    table.take("own_head.weight", {"lm_head.weight": (count, hidden)})
    if table.has("t2d"):
        table.drop("t2d", "all tokens can be drafted")
    return None


def _take_drafted(table: TensorTable, hidden: int, vocab: int, count: int) -> int | None:
    """Add the head and the draft vocabulary of a drafter that names the tokens of its head."""
    ids = torch.arange(count) + table.read("d2t", (count,))
    order = ids.argsort()
    _check_ids(table, ids, vocab)
    is_sorted = bool((order == torch.arange(count)).all())
    how = "unchanged" if is_sorted else "rows in the order of their tokens"
    shape = {"lm_head.weight": (count, hidden)}
    table.take("own_head.weight", shape, how, lambda parts: parts[0][order])
    if count == vocab:
        table.drop("d2t", "all tokens can be drafted")
        return None

    def as_ids(parts: list[Tensor]) -> Tensor:
        return (torch.arange(count) + parts[0]).sort().values

    how = "offsets added to the row numbers, sorted"
    table.take_ids("draft_ids", "d2t", (count,), how, as_ids)
    return count


def _check_ids(table: TensorTable, ids: Tensor, vocab: int) -> None:
    """Raise an error unless d2t gives different tokens, the same ones as t2d."""
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise table.unusable(
            f"d2t with tokens from 0 to {vocab - 1}", f"{int(ids.min())} to {int(ids.max())}"
        )
    if len(ids.unique()) < len(ids):
        raise table.unusable("d2t with different tokens", "the same token twice")
    if not table.has("t2d"):
        return
    stated = table.read("t2d", (vocab,)).bool()
    is_drafted = torch.zeros_like(stated)
    is_drafted[ids] = True
    if not torch.equal(stated, is_drafted):
        raise table.unusable("t2d with the tokens of d2t", "other tokens")
    table.drop("t2d", "d2t has the same tokens")
