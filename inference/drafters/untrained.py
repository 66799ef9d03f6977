"""Drafters that need no training, by the names that callers use."""

import re
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from inference.drafters.aded import AdedDrafter, AdedSettings
from inference.drafters.lookup import LookupDrafter, LookupSettings
from inference.drafters.trigram_file import load_trigrams
from inference.drafters.trigram_index import check_vocabulary
from jakiro.settings import SettingsT, load_settings

ADED, LOOKUP = "aded", "lookup"
UNTRAINED = (ADED, LOOKUP)

_NAME = re.compile(r"(aded|lookup|aded=.+)")


class UntrainedName(NamedTuple):
    """A drafter as a caller names it.

    Attributes:
        kind: `aded` or `lookup`.
        table: file of trigrams that `aded` begins with.
        settings: YAML file of the drafter's settings.
        num_nodes: most candidates of a tree, instead of what the settings say.
    """

    kind: str
    table: Path | None = None
    settings: Path | None = None
    num_nodes: int | None = None

    @classmethod
    def parse(cls, text: str) -> "UntrainedName | None":
        """Return what `aded`, `aded=TABLE` or `lookup` names; None for anything else."""
        if not _NAME.fullmatch(text):
            return None
        kind, _, table = text.partition("=")
        return cls(kind, Path(table) if table else None)


def build_untrained(
    name: UntrainedName, tokenizer: PreTrainedTokenizerBase
) -> AdedDrafter | LookupDrafter:
    """Return a drafter that needs no training.

    Args:
        name: which one.
        tokenizer: of the target.

    Raises:
        CheckpointError: the table is missing or damaged.
        TargetMismatch: the table was made with another tokenizer.
        ConfigError: the settings cannot be used, or the vocabulary is too large.
    """
    changes = {} if name.num_nodes is None else {"num_nodes": name.num_nodes}
    if name.kind == LOOKUP:
        lookup = _settings(LookupSettings, name.settings)
        return LookupDrafter(lookup.model_copy(update=changes))
    check_vocabulary(len(tokenizer))
    index = None if name.table is None else load_trigrams(name.table, tokenizer)
    aded = _settings(AdedSettings, name.settings)
    return AdedDrafter(aded.model_copy(update=changes), index)


def _settings(cls: type[SettingsT], path: Path | None) -> SettingsT:
    return cls() if path is None else load_settings(cls, path)
