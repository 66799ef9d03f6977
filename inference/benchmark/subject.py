"""Loads what is compared: the target, and the methods that decode with it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.benchmark.method_names import (
    ASSISTED,
    DRAFTER,
    LOOKUP,
    PLAIN,
    TRANSFORMERS,
    MethodName,
)
from inference.benchmark.methods import Method, OwnDecoding
from inference.benchmark.transformers_methods import TransformersDecoding
from inference.benchmark.tree_trial import Trial
from inference.decoder import SpeculativeDecoder
from inference.drafters.aded.drafter import AdedDrafter
from inference.drafters.combined.knowledge import CombinedSettings
from inference.drafters.lookup import LookupDrafter
from inference.drafters.registry import (
    UNTRAINED,
    UntrainedName,
    build_beside,
    build_untrained,
)
from inference.drafters.repeating import RepeatingDrafter, RepeatSettings
from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from jakiro.utils.pretrained import load_causal_lm, load_tokenizer
from jakiro.utils.settings import load_settings

LOOKUP_TOKENS = (3, 5, 10)  # drafted per forward; the fastest counts


def load_target(
    place: str, dtype: str | torch.dtype, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a target and its tokenizer.

    Raises:
        CheckpointError: one of them cannot be loaded.
    """
    model = load_causal_lm(place, dtype=dtype, device=device)
    return model, load_tokenizer(place, "the tokenizer of the target")


def build_methods(
    names: Sequence[MethodName],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    trial: Trial | None = None,
) -> list[Method]:
    """Return the methods; one that counts by its best setting is several of one family.

    Args:
        names: of the methods.
        model: the target.
        tokenizer: its tokenizer.
        trial: needed where measured costs choose the trees, such as from `trial_for`.

    Raises:
        CheckpointError: a drafting model or table cannot be loaded.
        TargetMismatch: it belongs to another target.
        ConfigError: it has another vocabulary, or settings that cannot be used.
    """
    trial = trial or Trial()
    return [method for one in names for method in _BUILDERS[one.kind](one, model, tokenizer, trial)]


def _transformers(one: MethodName, model: PreTrainedModel, *_: object) -> list[Method]:
    return [TransformersDecoding(one.name, one.kind, model)]


def _lookup(one: MethodName, model: PreTrainedModel, *_: object) -> list[Method]:
    return [
        TransformersDecoding(
            f"{one.name} ({count})",
            one.kind,
            model,
            family=one.name,
            note=f"prompt_lookup_num_tokens={count}",
            prompt_lookup_num_tokens=count,
        )
        for count in LOOKUP_TOKENS
    ]


def _assisted(one: MethodName, model: PreTrainedModel, *_: object) -> list[Method]:
    assistant = _assistant(str(one.path), model)
    return [TransformersDecoding(one.name, one.kind, model, assistant_model=assistant)]


def _plain(
    one: MethodName, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, _: object
) -> list[Method]:
    return [OwnDecoding(one.name, one.kind, SpeculativeDecoder(model, tokenizer=tokenizer))]


def _drafted(
    one: MethodName, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, trial: Trial
) -> list[Method]:
    drafter = JakiroDrafter.from_pretrained(str(one.path))
    both: dict[str, Any] = {"beside": _beside(one, model, tokenizer), "sharing": _sharing(one)}
    decoder = SpeculativeDecoder(model, drafter, tokenizer, **both)
    if (plan := trial.plan(one, decoder, drafter)) is not None:
        decoder = SpeculativeDecoder(model, drafter, tokenizer, plan, **both)
    return [OwnDecoding(one.name, one.kind, _with_repeats(one, decoder), trial.note(one))]


def _untrained(
    one: MethodName, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, _: object
) -> list[Method]:
    settings = None if one.settings is None else Path(one.settings)
    assert one.candidates != "costs", "refused when the name was parsed"
    name = UntrainedName(one.kind, one.path, settings, one.candidates)
    drafter, beside = build_untrained(name, model, tokenizer), _beside(one, model, tokenizer)
    decoder = SpeculativeDecoder(model, drafter, tokenizer, beside=beside, sharing=_sharing(one))
    return [OwnDecoding(one.name, one.kind, _with_repeats(one, decoder))]


def _beside(
    one: MethodName, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> AdedDrafter | LookupDrafter | None:
    if one.beside is None:
        return None
    settings = None if one.beside_settings is None else Path(one.beside_settings)
    return build_beside(one.beside, model, tokenizer, settings)


def _sharing(one: MethodName) -> CombinedSettings | None:
    if one.sharing_settings is None:
        return None
    return load_settings(CombinedSettings, Path(one.sharing_settings))


def _with_repeats(one: MethodName, decoder: SpeculativeDecoder) -> SpeculativeDecoder:
    if one.merged_repeats is None:
        return decoder
    assert decoder.drafter is not None, "refused when the name was parsed"
    repeating = RepeatingDrafter(decoder.drafter, RepeatSettings(num_nodes=one.merged_repeats))
    return SpeculativeDecoder(decoder.target.model, repeating, decoder.tokenizer)


def _assistant(place: str, model: PreTrainedModel) -> PreTrainedModel:
    assistant = load_causal_lm(place, "the assistant", dtype=model.dtype, device=model.device)
    own, other = (one.config.get_text_config().vocab_size for one in (model, assistant))
    if own != other:
        raise ConfigError(
            f"the assistant {place} has another vocabulary than the target",
            expected=f"{own} tokens",
            got=other,
            remedy="use a model with the target's own tokenizer",
        )
    return assistant


_BUILDERS: dict[str, Callable[..., list[Method]]] = {
    TRANSFORMERS: _transformers,
    LOOKUP: _lookup,
    ASSISTED: _assisted,
    PLAIN: _plain,
    DRAFTER: _drafted,
    **dict.fromkeys(UNTRAINED, _untrained),
}
