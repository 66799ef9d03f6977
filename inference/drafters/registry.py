"""Names of the drafters that need no training, and construction of these drafters."""

import re
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.drafters.aded.drafter import AdedDrafter, AdedSettings
from inference.drafters.aded.file import load_trigrams, vocabulary_size
from inference.drafters.aded.index import check_vocabulary
from inference.drafters.lookup import LookupDrafter, LookupSettings
from inference.drafters.small_lm import SmallLMDrafter, SmallLMSettings
from jakiro.errors import ConfigError
from jakiro.utils.packaged_drafters import packaged_drafter, packaged_names
from jakiro.utils.settings import SettingsT, load_settings

ADED, LOOKUP, LM = "aded", "lookup", "lm"
UNTRAINED = (ADED, LOOKUP, LM)

_NAME = re.compile(r"(aded|lookup|aded=.+|lm=.+)")
_PAIR = re.compile(r"(aded|lookup|aded=.+?)\+((?:drafter|lm)=.+)")


class UntrainedName(NamedTuple):
    """The name of a drafter that needs no training.

    Attributes:
        kind: `aded`, `lookup` or `lm`.
        path: for `aded`, file of the trigrams with which the table starts, or None to start with an
            empty table; for `lm`, folder or hub id of the small model.
        settings: YAML file of the drafter's settings; None for the defaults.
        num_nodes: largest number of candidates in a tree; None for the number in the settings.
    """

    kind: str
    path: str | None = None
    settings: Path | None = None
    num_nodes: int | None = None

    @classmethod
    def parse(cls, text: str) -> "UntrainedName | None":
        """Parse `aded`, `aded=TABLE`, `lookup` or `lm=MODEL`; return None for anything else.

        `lm` belongs to these names because the small model needs no training for drafting.
        """
        if not _NAME.fullmatch(text):
            return None
        kind, _, path = text.partition("=")
        return cls(kind, path or None)


class PairName(NamedTuple):
    """The names of two drafters that share trees.

    Attributes:
        second: second, training-free drafter: `aded`, `aded=TABLE` or `lookup`.
        first: first drafter: `drafter=DRAFTER` or `lm=MODEL`.
    """

    second: str
    first: str

    @classmethod
    def parse(cls, text: str) -> "PairName | None":
        """Parse a pair such as `aded+drafter=DRAFTER`; return None for a single drafter."""
        found = _PAIR.fullmatch(text)
        return None if found is None else cls(found[1], found[2])


def refuse_misspelt(name: str) -> None:
    """Raise an error for a name that is similar to that of a known drafter.

    Args:
        name: folder or hub id of a trained drafter, or another name.

    Raises:
        ConfigError: nothing exists at this path, and the name is similar to `aded`, `lookup` or
            the name of a drafter in this package.
    """
    if "/" in name or Path(name).exists() or packaged_drafter(name) is not None:
        return
    known = (ADED, LOOKUP, *packaged_names())
    similar = get_close_matches(name.partition("=")[0].lower(), known, n=1, cutoff=0.7)
    if similar:
        raise ConfigError(
            f"there is no drafter {name}",
            expected="a folder, a hub id such as owner/name, aded, aded=TABLE, lookup or lm=MODEL",
            got=name,
            remedy=f"use {similar[0]}",
        )


def build_second(
    name: str,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: Path | None = None,
) -> AdedDrafter | LookupDrafter:
    """Return the second drafter of a pair; this raises the same errors as `build_untrained`.

    Args:
        name: `aded`, `aded=TABLE` or `lookup`.
        target: target that the drafter drafts for.
        tokenizer: tokenizer of the target.
        settings: YAML file of the drafter's settings; None for the defaults.
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
        name: name of the drafter.
        target: target that the drafter drafts for.
        tokenizer: tokenizer of the target.

    Raises:
        CheckpointError: the table or the model is missing or damaged.
        TargetMismatch: the table or the model was made with a tokenizer other than the target's.
        TargetNotSupported: the small model cannot process a tree.
        ConfigError: the settings are invalid, or the vocabulary is too large.
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
