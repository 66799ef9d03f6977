"""The config of a drafter of EAGLE-3 in the layouts of EAGLE and of speculators."""

from collections.abc import Mapping, Sequence
from typing import Any

from jakiro.exchange.checkpoint import DraftCheckpoint
from jakiro.exchange.table import TensorTable

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
        found = self._config.get(name)
        return self._inner.get(name) if found is None else found

    def flag(self, name: str, default: bool) -> bool:
        """Return a value that is true or false."""
        found = self.get(name)
        return default if found is None else bool(found)

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
        found: list[tuple[Mapping[str, Any], ...]] = []
        if self.output_norm == "feedback":
            found.append(tuple({"experts": {"output_norm": use}} for use in ("feedback", "head")))
        if self.is_residual_normed:
            found.append(tuple({"trunk": {"residual": start}} for start in ("normed", "feature")))
        return tuple(found)

    def hidden_states(self, count: int) -> tuple[tuple[int, ...], ...]:
        """Return the possible indices of hidden states, or nothing if the config names no layers.

        Some projects count hidden states, where 0 is the embedding. Others count layers, and their
        layer k gives the hidden state k + 1.
        """
        found = next((ids for key in _ID_KEYS if (ids := self.get(key)) is not None), None)
        if found is None:
            if count != _NUM_DEFAULT:
                raise self._table.unusable(f"{IDS} with {count} indices", "none")
            return ()
        is_list = isinstance(found, Sequence) and all(type(index) is int for index in found)
        if not is_list or len(set(found)) != count or len(found) != count:
            raise self._table.unusable(f"{IDS} with {count} different indices", found)
        # States are joined in ascending order, whatever the order in the config.
        own = tuple(sorted(found))
        if own[0] < 0:
            raise self._table.unusable(f"{IDS} of at least 0", found)
        if self.is_certain:
            return (own,)
        return own, tuple(index + 1 for index in own)
