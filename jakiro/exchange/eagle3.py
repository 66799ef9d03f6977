"""Import of EAGLE-3 (arXiv 2503.01840) and EAGLE-3.1, in the layouts of EAGLE and of speculators.

The attention of their layer reads the normalized embedding and the normalized feature side by side.
The feature is fused from several hidden states of the target at verified tokens, and it is the
output of the layer before its final norm at drafted tokens. The head is the drafter's own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from jakiro.drafter_settings import DrafterSettings
from jakiro.exchange.checkpoint import DraftCheckpoint, TensorTable
from jakiro.exchange.eagle import LEVELS, LayerConfig, layer_config, take_attention, take_experts
from jakiro.exchange.plan import ImportPlan
from jakiro.utils.settings import validate_settings

IDS = "eagle_aux_hidden_state_layer_ids"
EXPORTED_BY = "exported_by"  # key of configs that `jakiro export` wrote, which leave nothing open
_NUM_DEFAULT = 3  # number of hidden states that are read if the config names none
_ID_KEYS = (IDS, "aux_hidden_state_layer_ids", "layer_ids")


class Eagle3Config:
    """The config of a drafter, compared with its tensors.

    Attributes:
        is_nested: whether the layout is that of speculators, with a config of the layer of its own.
        is_certain: whether the config can have one meaning only.
    """

    def __init__(self, checkpoint: DraftCheckpoint, table: TensorTable) -> None:
        self._table = table
        self._config = checkpoint.config
        nested = self._config.get("transformer_layer_config")
        self.is_nested = "speculators_model_type" in self._config or isinstance(nested, Mapping)
        self.is_certain = self.is_nested or str(self._config.get(EXPORTED_BY)).startswith("jakiro ")
        layer = dict(nested) if isinstance(nested, Mapping) else dict(self._config)
        self.layer: dict[str, Any] = layer
        inner = self._config.get("eagle_config")
        self._inner: Mapping[str, Any] = inner if isinstance(inner, Mapping) else {}
        for name in ("use_aux_hidden_state", "use_aux_hidden_states"):
            if not self.flag(name, default=True):
                raise table.unusable("a drafter that fuses hidden states", f"{name} false")

    def get(self, name: str) -> Any:
        """Return a value from the config or its `eagle_config`; None if there is none."""
        value = self._config.get(name)
        return self._inner.get(name) if value is None else value

    def flag(self, name: str, default: bool) -> bool:
        """Return a value that is true or false."""
        value = self.get(name)
        return default if value is None else bool(value)

    @property
    def is_residual_normed(self) -> bool:
        """Whether the residual stream starts with the normed feature."""
        return self.flag("norm_before_residual", default=self.is_nested)

    @property
    def output_norm(self) -> str:
        """The use of the norm of the output: none, head or feedback."""
        is_fed_back = self.flag("norm_output", default=False)
        if self._table.has("norm.weight"):
            return "feedback" if is_fed_back else "head"
        if is_fed_back:
            raise self._table.unusable("norm.weight, because norm_output is true", "none")
        return "none"

    @property
    def open_settings(self) -> tuple[tuple[Mapping[str, Any], ...], ...]:
        """The settings that configs in the layout of EAGLE name, but not always correctly.

        Configs that older versions of SpecForge wrote claim a normalized feedback that was not
        trained, and those from templates of ModelOpt a normalized residual.
        """
        if self.is_certain:
            return ()
        questions: list[tuple[Mapping[str, Any], ...]] = []
        if self.output_norm == "feedback":
            uses = ("feedback", "head")
            questions.append(tuple({"experts": {"output_norm": use}} for use in uses))
        if self.is_residual_normed:
            starts = ("normed", "feature")
            questions.append(tuple({"trunk": {"residual": start}} for start in starts))
        return tuple(questions)

    def hidden_states(self, count: int) -> tuple[tuple[int, ...], ...]:
        """Return the possible indices of hidden states, or nothing if the config names no layers.

        Some projects count hidden states, where 0 is the embedding. Others count layers, and their
        layer k gives the hidden state k + 1.
        """
        given = next((ids for key in _ID_KEYS if (ids := self.get(key)) is not None), None)
        if given is None:
            if count != _NUM_DEFAULT:
                raise self._table.unusable(f"{IDS} with {count} indices", "none")
            return ()
        is_list = isinstance(given, Sequence)
        is_list = is_list and all(type(index) is int and index >= 0 for index in given)
        if not is_list or len(set(given)) != count or len(given) != count:
            raise self._table.unusable(f"{IDS} with {count} different indices", given)
        # States are joined in ascending order, whatever the order in the config.
        ids = tuple(sorted(given))
        return (ids,) if self.is_certain else (ids, tuple(index + 1 for index in ids))


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
        "schedule": {"autoregressive_levels": LEVELS, "parallel_levels": 0},
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
    table.take("draft_ids", {"d2t": (count,)}, how, as_ids)
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
