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
from jakiro.exchange.table import TensorTable, cannot_import
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
    values, table = _Values(checkpoint), TensorTable(checkpoint)
    config = layer_config(values.layer, checkpoint.source)
    _check_inputs(values, table)
    num_states = _num_states(table, config.hidden_size)
    ids = _ids_in(values, table, num_states)
    trunk = _take_trunk(values, table, config, num_states)
    trunk["fusion_layers"] = ids[0] if ids else tuple(range(2, 2 + num_states))
    settings: dict[str, Any] = {
        "trunk": trunk,
        "experts": _take_experts(values, table, config.hidden_size),
        "schedule": {"autoregressive_levels": _LEVELS, "parallel_levels": 0},
        "norm_eps": config.rms_norm_eps,
        "draft_vocab_size": _take_head(values, table, config),
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
        open_settings=_open_settings(values, settings["experts"]),
    )


def _take_trunk(
    values: "_Values", table: TensorTable, config: LayerConfig, num_states: int
) -> dict[str, Any]:
    """Add everything before the feed-forward network, and return the settings of the trunk."""
    hidden, heads, layer = config.hidden_size, config.heads, _prefix(table)
    fusion_norm = _take_fusion(values, table, hidden, num_states)
    for ours, name in (("feature_norm", "hidden_norm"), ("token_norm", "input_layernorm")):
        table.take(f"trunk.feature_input.{ours}.weight", {f"{layer}{name}.weight": (hidden,)})
    is_normed = values.flag("norm_before_residual", values.is_nested)
    return {
        "kind": "feedback",
        "input": "wide",
        "residual": "normed" if is_normed else "feature",
        "input_bias": table.has("fc.bias"),
        "attention_norm": False,
        "attention_bias": take_attention(table, f"{layer}self_attn.", heads, 2 * hidden, hidden),
        "qk_norm": table.has(f"{layer}self_attn.q_norm.weight"),
        "first_position": False,
        "fusion_norm": fusion_norm,
        "rope": config.rope.model_dump(),
        **heads.model_dump(),
    }


def _take_experts(values: "_Values", table: TensorTable, hidden: int) -> dict[str, Any]:
    """Add the feed-forward network and the norm after it, and return the settings of experts."""
    layer, output_norm = _prefix(table), _output_norm(values, table)
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


def _open_settings(
    values: "_Values", experts: Mapping[str, Any]
) -> tuple[tuple[Mapping[str, Any], ...], ...]:
    """Return the settings that configs in the layout of EAGLE name, but not always correctly.

    Configs that older versions of SpecForge wrote name a normed feedback that was not trained, and
    templates of ModelOpt a normed residual.
    """
    if values.is_nested:
        return ()
    found: list[tuple[Mapping[str, Any], ...]] = []
    if experts["output_norm"] == "feedback":
        found.append(tuple({"experts": {"output_norm": use}} for use in ("feedback", "head")))
    if values.flag("norm_before_residual", default=False):
        found.append(tuple({"trunk": {"residual": start}} for start in ("normed", "feature")))
    return tuple(found)


class _Values:
    """The config of a drafter in either layout.

    Args:
        checkpoint: published drafter.
    """

    def __init__(self, checkpoint: DraftCheckpoint) -> None:
        self._source = checkpoint.source
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
        """Return a value that is true or false.

        Raises:
            CheckpointError: it is neither.
        """
        found = self.get(name)
        if not isinstance(found, bool | None):
            raise cannot_import(self._source, f"true or false for {name} in config.json", found)
        return default if found is None else found


def _num_states(table: TensorTable, hidden: int) -> int:
    columns = table.matrix("fc.weight")[1]
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


def _take_fusion(values: _Values, table: TensorTable, hidden: int, num_states: int) -> str:
    """Add the matrix that fuses hidden states, and return the kind of the norm before it."""
    ours = "feature_encoder"
    _check_flag(values, table, "fc_norm", "fc_norm.0.weight")
    _check_flag(values, table, "norm_before_fc", "input_norm.weight")
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


def _check_flag(values: _Values, table: TensorTable, flag: str, name: str) -> None:
    """Raise an error if the config says other than the tensors whether there is a norm."""
    found = values.get(flag)
    if found is not None and values.flag(flag, default=False) != table.has(name):
        raise table.unusable(
            f"{flag} in config.json that agrees with the tensors",
            f"{flag} {str(found).lower()} and {'' if table.has(name) else 'no '}{name}",
        )


def _output_norm(values: _Values, table: TensorTable) -> str:
    """Return the use of the norm of the output."""
    _check_flag(values, table, "use_last_layernorm", "norm.weight")
    is_fed_back = values.flag("norm_output", default=False)
    if table.has("norm.weight"):
        return "feedback" if is_fed_back else "head"
    if is_fed_back:
        raise table.unusable("norm.weight, because norm_output is true", "none")
    return "none"


def _take_head(values: _Values, table: TensorTable, config: LayerConfig) -> int | None:
    """Add the head and the draft vocabulary, and return its size; None if it has all tokens."""
    count = table.matrix("lm_head.weight")[0]
    if (size := values.get("draft_vocab_size")) not in (None, count):
        raise table.unusable(f"a head for the draft_vocab_size {size}", f"one for {count} tokens")
    if table.has("d2t"):
        return _take_drafted(table, config, count)
    if count != config.vocab_size:
        raise table.unusable("d2t, or a head for all tokens", f"a head for {count} tokens")
    table.take("own_head.weight", {"lm_head.weight": (count, config.hidden_size)})
    if table.has("t2d"):
        table.drop("t2d", "all tokens can be drafted")
    return None


def _take_drafted(table: TensorTable, config: LayerConfig, count: int) -> int | None:
    """Add the head and the draft vocabulary of a drafter that names the tokens of its head."""
    ids = torch.arange(count) + table.read("d2t", (count,))
    order = ids.argsort()
    _check_ids(table, ids, config.vocab_size)
    is_sorted = bool((order == torch.arange(count)).all())
    how = "unchanged" if is_sorted else "rows in the order of their tokens"
    shape = {"lm_head.weight": (count, config.hidden_size)}
    table.take("own_head.weight", shape, how, lambda parts: parts[0][order])
    if count == config.vocab_size:
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
