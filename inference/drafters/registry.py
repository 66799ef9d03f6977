"""Construction of the drafters that need no training, from their names."""

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.drafters.aded.drafter import AdedDrafter, AdedSettings
from inference.drafters.aded.file import load_trigrams
from inference.drafters.lookup import LookupDrafter, LookupSettings
from inference.drafters.names import LM, LOOKUP, UntrainedName
from inference.drafters.small_lm import SmallLMDrafter, SmallLMSettings
from jakiro.utils.settings import SettingsT, load_settings


def build_second(
    name: str,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: Path | None = None,
) -> AdedDrafter | LookupDrafter:
    known = UntrainedName.parse(name)
    assert known is not None, "checked when the name was parsed"
    if known.kind == LOOKUP:
        return LookupDrafter(_settings(LookupSettings, settings))
    return _aded(known._replace(settings=settings), {}, target, tokenizer)


def build_untrained(
    name: UntrainedName, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> AdedDrafter | LookupDrafter | SmallLMDrafter:
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
    size = int(target.config.get_text_config().vocab_size)
    index = None if name.path is None else load_trigrams(Path(name.path), tokenizer, size)
    aded = _settings(AdedSettings, name.settings)
    return AdedDrafter(aded.model_copy(update=changes), index)


def _settings(cls: type[SettingsT], path: Path | None) -> SettingsT:
    return cls() if path is None else load_settings(cls, path)
