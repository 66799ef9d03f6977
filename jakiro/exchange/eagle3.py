"""EAGLE-3 (arXiv 2503.01840) and EAGLE-3.1, in the layouts of EAGLE and of speculators, imported.

The attention of their layer reads the normalized embedding and the normalized feature side by side.
The feature is fused from several hidden states of the target at verified tokens, and it is the
output of the layer before its final norm at drafted tokens. The head is the drafter's own.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from jakiro.drafter_settings import DrafterSettings
from jakiro.exchange.checkpoint import DraftCheckpoint
from jakiro.exchange.eagle import LEVELS, attention_settings, layer_config
from jakiro.exchange.mapping import (
    COPY,
    STACK,
    Row,
    TensorTable,
    Transform,
    attention_rows,
    expert_rows,
    zeros,
)
from jakiro.exchange.plan import OUTPUT_NORMS, ImportPlan
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


def eagle3_rows(settings: DrafterSettings, hidden: int, layer: str) -> Iterator[Row]:
    """Yield everything but the head with its draft vocabulary, and the router, which has no effect.

    Args:
        layer: prefix of the names of the layer's tensors.
    """
    trunk, experts = settings.trunk, settings.experts
    encoder, count = "feature_encoder", len(trunk.fusion_layers or ())
    yield Row(f"{encoder}.output.weight", {"fc.weight": (hidden, count * hidden)})
    if trunk.input_bias:
        yield Row(f"{encoder}.output.bias", {"fc.bias": (hidden,)})
    if trunk.fusion_norm == "each":
        names = [f"fc_norm.{index}.weight" for index in range(count)]
        yield Row(f"{encoder}.state_norm.weight", dict.fromkeys(names, (hidden,)), STACK)
    elif trunk.fusion_norm == "all":
        rows = Transform(
            "one row for each state",
            lambda parts: parts[0].view(count, hidden),
            lambda part, _: [part.flatten()],
        )
        yield Row(f"{encoder}.state_norm.weight", {"input_norm.weight": (count * hidden,)}, rows)
    norms = {
        "trunk.feature_input.feature_norm.weight": f"{layer}hidden_norm.weight",
        "trunk.feature_input.token_norm.weight": f"{layer}input_layernorm.weight",
        "experts.norm.weight": f"{layer}post_attention_layernorm.weight",
    }
    if experts.output_norm != "none":
        norms[OUTPUT_NORMS[experts.output_norm]] = "norm.weight"
    yield from (Row(ours, {name: (hidden,)}) for ours, name in norms.items())
    yield from attention_rows(f"{layer}self_attn.", trunk, 2 * hidden, hidden)
    yield from expert_rows([f"{layer}mlp."], hidden, experts.intermediate_size)


def read_eagle3(checkpoint: DraftCheckpoint) -> ImportPlan:
    """Return the plan for importing a drafter of EAGLE-3."""
    table = TensorTable(checkpoint)
    values = Eagle3Config(checkpoint, table)
    config = layer_config(values.layer, checkpoint.source)
    layer = "midlayer." if table.has("midlayer.hidden_norm.weight") else "layers.0."
    num_states = _num_states(table, config.hidden_size)
    ids = values.hidden_states(num_states)
    norms = {"each": "fc_norm.0.weight", "all": "input_norm.weight"}
    stated = values.get("draft_vocab_size")
    fields: dict[str, Any] = {
        "trunk": {
            "kind": "feedback",
            "input": "wide",
            "residual": "normed" if values.is_residual_normed else "feature",
            "input_bias": table.has("fc.bias"),
            "attention_norm": False,
            "first_position": False,
            "fusion_layers": ids[0] if ids else tuple(range(2, 2 + num_states)),
            "fusion_norm": next((kind for kind in norms if table.has(norms[kind])), "none"),
            **attention_settings(table, f"{layer}self_attn.", config, config.heads),
        },
        "experts": {
            "num_experts": 1,
            "intermediate_size": table.matrix(f"{layer}mlp.gate_proj.weight")[0],
            "combine": "sum",
            "head": "own",
            "output_norm": values.output_norm,
        },
        "schedule": {"autoregressive_levels": LEVELS, "parallel_levels": 0},
        "norm_eps": config.rms_norm_eps,
        "draft_vocab_size": take_head(table, config.hidden_size, config.vocab_size, stated),
    }
    settings = validate_settings(DrafterSettings, fields, source=checkpoint.source)
    table.take(eagle3_rows(settings, config.hidden_size, layer))
    table.take([zeros("experts.router.weight", 1, config.hidden_size)])
    table.compare("embed_tokens.weight", "embeddings")
    table.finish()
    return ImportPlan(
        "EAGLE-3, layout of " + ("speculators" if values.is_nested else "EAGLE"),
        settings,
        table,
        config.hidden_size,
        config.vocab_size,
        ids,
        reads_default=not ids,
        open_settings=values.open_settings,
    )


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
    table.take([Row("own_head.weight", {"lm_head.weight": (count, hidden)})])
    if table.has("t2d"):
        table.drop("t2d", "all tokens can be drafted")
    return None


def _take_drafted(table: TensorTable, hidden: int, vocab: int, count: int) -> int | None:
    """Add the head and the draft vocabulary of a drafter that names the tokens of its head."""
    ids = torch.arange(count) + table.read("d2t", (count,))
    _check_ids(table, ids, vocab)
    head = {"lm_head.weight": (count, hidden)}
    table.take([Row("own_head.weight", head, sort_by_token(table))])
    if count == vocab:
        table.drop("d2t", "all tokens can be drafted")
        return None
    how = "offsets added to the row numbers, sorted"
    as_ids = Transform(how, lambda _: ids.sort().values)
    table.take([Row("draft_ids", {"d2t": (count,)}, as_ids)])
    return count


def sort_by_token(table: TensorTable) -> Transform:
    """Return the import of a matrix with a row for each drafted token, as the head has them."""
    if not table.has("d2t"):
        return COPY
    shape = table.shape("d2t")
    order = (torch.arange(shape[0]) + table.read("d2t", shape)).argsort()
    is_sorted = bool((order == torch.arange(len(order))).all())
    how = "unchanged" if is_sorted else "rows in the order of their tokens"
    return Transform(how, lambda parts: parts[0][order])


def draft_vocabulary(ids: Tensor, vocab: int) -> dict[str, Tensor]:
    """Return the tensors that name the tokens of a head, in the opposite direction."""
    is_drafted = torch.zeros(vocab, dtype=torch.bool)
    is_drafted[ids.cpu()] = True
    return {"d2t": ids - torch.arange(len(ids), device=ids.device), "t2d": is_drafted}


def _check_ids(table: TensorTable, ids: Tensor, vocab: int) -> None:
    """Raise an error unless d2t gives different tokens, the same ones as t2d."""
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab or len(ids.unique()) < len(ids):
        raise table.unusable(f"d2t with different tokens from 0 to {vocab - 1}", "others")
    if table.has("t2d"):
        stated = table.read("t2d", (vocab,)).bool().nonzero().flatten()
        if not torch.equal(stated, ids.sort().values):
            raise table.unusable("t2d with the tokens of d2t", "other tokens")
        table.drop("t2d", "d2t has the same tokens")
