"""Loading of a decoder's parts: target, drafter or two of them, and tokenizer."""

from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.adaptation.weights import sampled_weights
from inference.autotune.setup import Pair
from inference.drafters.aded.drafter import AdedDrafter, AdedSettings
from inference.drafters.aded.table import TrigramIndex, load_trigrams
from inference.drafters.combined.drafter import CombinedDrafter
from inference.drafters.lookup import LookupDrafter, LookupSettings
from inference.drafters.names import ADED, LM, LOOKUP, PairName, UntrainedName
from inference.drafters.small_lm import SmallLMDrafter, SmallLMSettings
from inference.protocol import Drafter
from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.files import fingerprint
from jakiro.utils.logs import get_logger, quiet_libraries
from jakiro.utils.packaged import packaged_drafter, packaged_names
from jakiro.utils.pretrained import load_causal_lm, load_tokenizer
from jakiro.utils.settings import SettingsT, load_settings

_logger = get_logger(__name__)

_REMEDY = "pass --target on the command line, or target= in Python, with the target's folder or id"
# Arguments that also choose the tokenizer.
_OF_HUB = ("revision", "token", "cache_dir", "subfolder", "local_files_only", "trust_remote_code")

_Target = tuple[PreTrainedModel, PreTrainedTokenizerBase]


class Parts(NamedTuple):
    target: PreTrainedModel
    drafter: JakiroDrafter | Drafter | Pair
    tokenizer: PreTrainedTokenizerBase


@quiet_libraries()
def load_parts(drafter: str | Path, target: str | Path | None, **load: Any) -> Parts:
    """Load the parts of a decoder; names are those of `SpeculativeDecoder.from_pretrained`."""

    def target_of(default: str | None) -> _Target:
        name = target or default
        if name is None:
            raise ConfigError(
                f"a target must be given, because the drafter {drafter} does not name one",
                remedy=_REMEDY,
            )
        return _load_target(str(name), load)

    return _parts(str(drafter), target_of)


def parts_over(drafter: str, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Parts:
    return _parts(drafter, lambda _: (target, tokenizer))


def _parts(name: str, target_of: Callable[[str | None], _Target]) -> Parts:
    """Return the parts of a decoder."""
    pair = PairName.parse(name)
    first = (name if pair is None else pair.first).removeprefix("drafter=")
    drafter: JakiroDrafter | Drafter | Pair
    if (untrained := UntrainedName.parse(first)) is not None:
        target, tokenizer = target_of(None)
        drafter = build_untrained(untrained, target, tokenizer)
    else:
        _refuse_misspelt(first)
        drafter = JakiroDrafter.from_pretrained(first)
        target, tokenizer = target_of(drafter.config.target_record.name_or_path)
    if pair is not None:
        drafter = with_second(drafter, pair.second, target, tokenizer)
    return Parts(target, drafter, tokenizer)


def with_second(
    first: JakiroDrafter | Drafter,
    second: str,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> Pair | CombinedDrafter:
    parsed = UntrainedName.parse(second)
    assert parsed is not None, "checked when the name was parsed"
    free = build_untrained(parsed, target, tokenizer)
    assert isinstance(free, AdedDrafter | LookupDrafter)
    if isinstance(first, JakiroDrafter):
        return Pair(first, partial(CombinedDrafter, second=free))
    assert isinstance(first, SmallLMDrafter), "checked when the name was parsed"
    return CombinedDrafter(first, free)


def build_untrained(
    name: UntrainedName, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> AdedDrafter | LookupDrafter | SmallLMDrafter:
    if name.kind == LOOKUP:
        return LookupDrafter(_settings(LookupSettings, name))
    if name.kind == LM:
        trees = _settings(SmallLMSettings, name)
        return SmallLMDrafter.from_pretrained(str(name.path), target, tokenizer, trees)
    size = int(target.config.get_text_config().vocab_size)
    index = None if name.path is None else load_trigrams(Path(name.path), tokenizer, size)
    return AdedDrafter(_settings(AdedSettings, name), index)


def _settings(cls: type[SettingsT], name: UntrainedName) -> SettingsT:
    settings = cls() if name.settings is None else load_settings(cls, name.settings)
    changes = {} if name.num_nodes is None else {"num_nodes": name.num_nodes}
    return settings.model_copy(update=changes)


def _refuse_misspelt(name: str) -> None:
    """Raise an error if nothing exists at a path that is similar to a known drafter's name."""
    if "/" in name or Path(name).exists() or packaged_drafter(name) is not None:
        return
    names = (ADED, LOOKUP, *packaged_names())
    if similar := get_close_matches(name.partition("=")[0].lower(), names, n=1, cutoff=0.7):
        raise ConfigError(f"there is no drafter {name}", remedy=f"use {similar[0]}")


def _load_target(name_or_path: str, load: dict[str, Any]) -> _Target:
    model = load_causal_lm(name_or_path, remedy=_REMEDY, **load)
    has_device = load.get("device_map") is not None or load.get("device") is not None
    if not has_device and model.device.type == "cpu" and torch.cuda.is_available():
        _logger.warning(
            "the target is on the CPU, although there is a GPU; remedy: pass "
            'device_map="cuda", or device_map="cpu" to compute on the CPU'
        )
    shared = {name: load[name] for name in _OF_HUB if name in load}
    return model, load_tokenizer(
        name_or_path, "the tokenizer of the target", remedy=_REMEDY, **shared
    )


def identity_of(drafter: Drafter) -> list[Any]:
    """Return what distinguishes a drafter from others, in a form that can be hashed."""
    fields = vars(drafter)
    settings = [str(fields.get(name)) for name in ("forms", "plan", "settings")]
    parts: list[Any] = [type(drafter).__name__, drafter.version, settings]
    model = fields.get("model")
    if isinstance(model, nn.Module):
        dtypes = [str(weight.dtype) for weight in model.parameters()]
        parts.append([dtypes, sampled_weights(model, torch.float64)])
    elif isinstance(model, TargetAdapter):
        parts.append([model.spec.fingerprint, str(model.dtype)])
    index = fields.get("index")
    if isinstance(index, TrigramIndex):
        parts.append(
            [fingerprint(column.tobytes()) for column in (index.keys, index.ids, index.weights)]
        )
    inner = (fields.get(name) for name in ("drafter", "first", "second"))
    return parts + [identity_of(other) for other in inner if isinstance(other, Drafter)]
