"""Drafters that need no training, by the names that callers use."""

import re
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.drafters.aded.drafter import AdedDrafter, AdedSettings
from inference.drafters.aded.file import load_trigrams, vocabulary_size
from inference.drafters.aded.index import check_vocabulary
from inference.drafters.lookup import LookupDrafter, LookupSettings
from inference.drafters.small_lm import SmallLMDrafter, SmallLMSettings
from jakiro.utils.settings import SettingsT, load_settings

ADED, LOOKUP, LM = "aded", "lookup", "lm"
UNTRAINED = (ADED, LOOKUP, LM)

_NAME = re.compile(r"(aded|lookup|aded=.+|lm=.+)")
_PAIR = re.compile(r"(aded|lookup|aded=.+?)\+((?:drafter|lm)=.+)")


class UntrainedName(NamedTuple):
    """A drafter as a caller names it.

    Attributes:
        kind: `aded`, `lookup` or `lm`.
        path: file of trigrams that `aded` begins with; folder or hub id of the small model of `lm`.
        settings: YAML file of the drafter's settings.
        num_nodes: most candidates of a tree, instead of what the settings say.
    """

    kind: str
    path: str | None = None
    settings: Path | None = None
    num_nodes: int | None = None

    @classmethod
    def parse(cls, text: str) -> "UntrainedName | None":
        """Return what `aded`, `aded=TABLE`, `lookup` or `lm=MODEL` names; None for anything else.

        A small model counts as untrained: it was not trained to draft.
        """
        if not _NAME.fullmatch(text):
            return None
        kind, _, path = text.partition("=")
        return cls(kind, path or None)


class PairName(NamedTuple):
    """Two drafters that share trees, as a caller names them.

    Attributes:
        beside: the second one: `aded`, `aded=TABLE` or `lookup`.
        first: `drafter=DRAFTER` or `lm=MODEL`.
    """

    beside: str
    first: str

    @classmethod
    def parse(cls, text: str) -> "PairName | None":
        """Return what `aded+drafter=DRAFTER`, say, names; None for a single drafter."""
        found = _PAIR.fullmatch(text)
        return None if found is None else cls(found[1], found[2])


def build_beside(
    name: str,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: Path | None = None,
) -> AdedDrafter | LookupDrafter:
    """Return a drafter that drafts beside another one; errors as for `build_untrained`.

    Args:
        name: `aded`, `aded=TABLE` or `lookup`.
        target: that it drafts for.
        tokenizer: of the target.
        settings: YAML file of its settings.
    """
    known = UntrainedName.parse(name)
    assert known is not None, "checked when the name was parsed"
    if known.kind == LOOKUP:
        return LookupDrafter(_settings(LookupSettings, settings))
    return _aded(known._replace(settings=settings), {}, target, tokenizer)


def build_untrained(
    name: UntrainedName, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> AdedDrafter | LookupDrafter | SmallLMDrafter:
    """Return a drafter that needs no training.

    Args:
        name: which one.
        target: that it drafts for.
        tokenizer: of the target.

    Raises:
        CheckpointError: table or model are missing or damaged.
        TargetMismatch: they were made with another tokenizer.
        ConfigError: the settings cannot be used, or the vocabulary is too large.
    """
    changes = {} if name.num_nodes is None else {"num_nodes": name.num_nodes}
    if name.kind == LOOKUP:
        lookup = _settings(LookupSettings, name.settings)
        return LookupDrafter(lookup.model_copy(update=changes))
    if name.kind == LM:
        trees = _settings(SmallLMSettings, name.settings).model_copy(update=changes)
        return SmallLMDrafter.from_pretrained(str(name.path), target, tokenizer, trees)
    return _aded(name, changes, target, tokenizer)


def _aded(
    name: UntrainedName,
    changes: dict[str, int],
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> AdedDrafter:
    check_vocabulary(vocabulary_size(tokenizer))
    size = int(target.config.get_text_config().vocab_size)
    index = None if name.path is None else load_trigrams(Path(name.path), tokenizer, size)
    aded = _settings(AdedSettings, name.settings)
    return AdedDrafter(aded.model_copy(update=changes), index)


def _settings(cls: type[SettingsT], path: Path | None) -> SettingsT:
    return cls() if path is None else load_settings(cls, path)
