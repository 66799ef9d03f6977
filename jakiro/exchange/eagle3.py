"""Import of EAGLE-3 (arXiv 2503.01840) and EAGLE-3.1, in the layouts of EAGLE and of speculators.

The attention of their layer reads the normalized embedding and the normalized feature side by side.
The feature is fused from several hidden states of the target at verified tokens, and it is the
output of the layer before its final norm at drafted tokens. The head is the drafter's own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from jakiro.config import DrafterSettings
from jakiro.exchange.checkpoint import DraftCheckpoint
from jakiro.exchange.llama_layer import LayerConfig, layer_config, take_attention, take_experts
from jakiro.exchange.plan import ImportPlan
from jakiro.exchange.table import TensorTable
from jakiro.utils.settings import validate_settings

IDS = "eagle_aux_hidden_state_layer_ids"
_LEVELS = 5  # depth of the trees that EAGLE drafts by default
_NUM_DEFAULT = 3  # number of hidden states that are read if the config names none
_ID_KEYS = (IDS, "aux_hidden_state_layer_ids", "layer_ids")


def read_eagle3(checkpoint: DraftCheckpoint) -> ImportPlan:
    """Return the plan for importing a drafter of EAGLE-3.

    Args:
        checkpoint: published drafter.

    Raises:
        CheckpointError: the drafter is not complete, or has parts that cannot be imported.
    """
    values = _Values(checkpoint)
    table = TensorTable(checkpoint)
    config = layer_config(values.layer, checkpoint.source)
    hidden, heads = config.hidden_size, config.heads
    layer = "midlayer." if table.has("midlayer.hidden_norm.weight") else "layers.0."
    _check_inputs(values, table)
    num_states = _num_states(table, hidden)
    ids = _ids_in(values, table, num_states)
    fusion_norm = _take_fusion(table, hidden, num_states)
    for ours, name in (("feature_norm", "hidden_norm"), ("token_norm", "input_layernorm")):
        table.take(f"trunk.feature_input.{ours}.weight", {f"{layer}{name}.weight": (hidden,)})
    attention = take_attention(table, f"{layer}self_attn.", heads, 2 * hidden, hidden)
    inner = table.shape(f"{layer}mlp.gate_proj.weight")[0]
    table.take("experts.norm.weight", {f"{layer}post_attention_layernorm.weight": (hidden,)})
    take_experts(table, [f"{layer}mlp."], hidden, inner)
    table.zeros("experts.router.weight", (1, hidden))
    has_norm = table.has("norm.weight")
    output_norm = _output_norm(values, has_norm)
    if has_norm:
        ours = "head_norm" if output_norm == "head" else "experts.output_norm"
        table.take(f"{ours}.weight", {"norm.weight": (hidden,)})
    num_drafted = _take_head(table, config)
    table.compare("embed_tokens.weight", "embeddings")
    table.finish()
    settings = {
        "trunk": {
            "kind": "feedback",
            "input": "wide",
            "residual": "normed"
            if values.flag("norm_before_residual", values.is_nested)
            else "feature",
            "input_bias": table.has("fc.bias"),
            "attention_norm": False,
            "attention_bias": attention,
            "qk_norm": table.has(f"{layer}self_attn.q_norm.weight"),
            "first_position": False,
            "fusion_layers": ids[0] if ids else tuple(range(2, 2 + num_states)),
            "fusion_norm": fusion_norm,
            "rope": config.rope.model_dump(),
            **heads.model_dump(),
        },
        "experts": {
            "num_experts": 1,
            "intermediate_size": inner,
            "combine": "sum",
            "head": "own",
            "output_norm": output_norm,
        },
        "schedule": {"autoregressive_levels": _LEVELS, "parallel_levels": 0},
        "norm_eps": config.rms_norm_eps,
        "draft_vocab_size": num_drafted,
    }
    validated = validate_settings(DrafterSettings, settings, source=checkpoint.source)
    family = "EAGLE-3, layout of " + ("speculators" if values.is_nested else "EAGLE")
    return ImportPlan(
        family, validated, table, hidden, config.vocab_size, ids, reads_default=not ids
    )


class _Values:
    """The config of a drafter in either layout.

    Args:
        checkpoint: published drafter.
    """

    def __init__(self, checkpoint: DraftCheckpoint) -> None:
        self._config = checkpoint.config
        nested = self._config.get("transformer_layer_config")
        self.is_nested = "speculators_model_type" in self._config or isinstance(nested, Mapping)
        layer = dict(nested) if isinstance(nested, Mapping) else dict(self._config)
        self.layer: dict[str, Any] = layer
        inner = self._config.get("eagle_config")
        self._inner: Mapping[str, Any] = inner if isinstance(inner, Mapping) else {}

    def get(self, name: str) -> Any:
        """Return a value from the config or its `eagle_config`; None if there is none."""
        found = self._config.get(name)
        return self._inner.get(name) if found is None else found

    def flag(self, name: str, default: bool) -> bool:
        """Return a value that is true or false."""
        found = self.get(name)
        return default if found is None else bool(found)


def _num_states(table: TensorTable, hidden: int) -> int:
    columns = table.shape("fc.weight")[-1]
    if columns % hidden:
        raise table.unusable(
            f"fc.weight that fuses states of the drafter's hidden size {hidden}",
            f"{columns} columns, for a target of another width",
        )
    return columns // hidden


def _ids_in(values: _Values, table: TensorTable, num_states: int) -> tuple[tuple[int, ...], ...]:
    """Return the possible indices of hidden states, or nothing if the config names no layers.

    Some projects count hidden states, where 0 is the embedding. Others count layers, and their
    layer k gives the hidden state k + 1.
    """
    found = next((ids for key in _ID_KEYS if (ids := values.get(key)) is not None), None)
    if found is None:
        if num_states != _NUM_DEFAULT:
            raise table.unusable(f"{IDS} with {num_states} indices", "none")
        return ()
    is_list = isinstance(found, Sequence) and all(type(index) is int for index in found)
    if not is_list or len(set(found)) != num_states or len(found) != num_states:
        raise table.unusable(f"{IDS} with {num_states} different indices", found)
    # States are joined in ascending order, whatever the order in the config.
    own = tuple(sorted(found))
    if own[0] < 0:
        raise table.unusable(f"{IDS} of at least 0", found)
    if values.is_nested:
        return (own,)
    return own, tuple(index + 1 for index in own)


def _check_inputs(values: _Values, table: TensorTable) -> None:
    """Raise an error unless the drafter fuses hidden states of a target of its own width."""
    for name in ("use_aux_hidden_state", "use_aux_hidden_states"):
        if not values.flag(name, default=True):
            raise table.unusable("a drafter that fuses hidden states", f"{name} false")
    width = values.get("target_hidden_size")
    if width not in (None, values.layer.get("hidden_size")):
        raise table.unusable("a target as wide as the drafter", f"target_hidden_size {width}")


def _take_fusion(table: TensorTable, hidden: int, num_states: int) -> str:
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


def _output_norm(values: _Values, has_norm: bool) -> str:
    if not has_norm:
        return "none"
    return "feedback" if values.flag("norm_output", default=False) else "head"


def _take_head(table: TensorTable, config: LayerConfig) -> int | None:
    """Add the head and the draft vocabulary, and return its size; None if it has all tokens."""
    hidden, vocab = config.hidden_size, config.vocab_size
    count = table.shape("lm_head.weight")[0]
    shape = {"lm_head.weight": (count, hidden)}
    if not table.has("d2t"):
        if count != vocab:
            raise table.unusable("d2t, or a head for all tokens", f"a head for {count} tokens")
        table.take("own_head.weight", shape)
        if table.has("t2d"):
            table.drop("t2d", "all tokens can be drafted")
        return None
    offsets = table.read("d2t", (count,))
    ids = torch.arange(count) + offsets
    order = ids.argsort()
    _check_ids(table, ids, vocab)
    is_sorted = bool((order == torch.arange(count)).all())
    how = "unchanged" if is_sorted else "rows in the order of their tokens"
    table.take("own_head.weight", shape, how, lambda parts: parts[0][order])
    if count == vocab:
        table.drop("d2t", "all tokens can be drafted")
        return None

    def as_ids(parts: list[Tensor]) -> Tensor:
        return (torch.arange(count) + parts[0]).sort().values

    table.take("draft_ids", {"d2t": (count,)}, "offsets added to the row numbers, sorted", as_ids)
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
    is_drafted = torch.zeros(vocab, dtype=torch.bool)
    is_drafted[ids] = True
    if not torch.equal(table.read("t2d", (vocab,)).bool(), is_drafted):
        raise table.unusable("t2d with the tokens of d2t", "other tokens")
    table.drop("t2d", "d2t has the same tokens")
