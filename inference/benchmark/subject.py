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
from inference.drafters.combined.drafter import CombinedDrafter
from inference.drafters.combined.knowledge import CombinedSettings
from inference.drafters.registry import (
    UNTRAINED,
    UntrainedName,
    build_beside,
    build_untrained,
)
from inference.drafters.repeating import RepeatingDrafter, RepeatSettings
from inference.drafters.small_lm import SmallLMDrafter
from inference.loading import Trees, combined_drafter
from inference.protocol import Drafter
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
    model = _load_model(place, dtype, device, "the target")
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
    decoder = SpeculativeDecoder(model, drafter, tokenizer)
    plan = trial.plan(one, decoder, drafter)
    if one.beside is not None:
        both = _combined(one, drafter, model, tokenizer, plan)
        decoder = SpeculativeDecoder(model, both, tokenizer)
    elif plan is not None:
        decoder = SpeculativeDecoder(model, drafter, tokenizer, plan)
    return [OwnDecoding(one.name, one.kind, _with_repeats(one, decoder), trial.note(one))]


def _untrained(
    one: MethodName, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, _: object
) -> list[Method]:
    settings = None if one.settings is None else Path(one.settings)
    assert one.candidates != "costs", "refused when the name was parsed"
    name = UntrainedName(one.kind, one.path, settings, one.candidates)
    drafter: Drafter = build_untrained(name, model, tokenizer)
    if one.beside is not None:
        assert isinstance(drafter, SmallLMDrafter), "checked when the name was parsed"
        drafter = _combined(one, drafter, model, tokenizer)
    decoder = SpeculativeDecoder(model, drafter, tokenizer)
    return [OwnDecoding(one.name, one.kind, _with_repeats(one, decoder))]


def _combined(
    one: MethodName,
    first: JakiroDrafter | SmallLMDrafter,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tree: Trees | None = None,
) -> CombinedDrafter:
    """Return the drafter of a method whose trees two drafters share."""
    assert one.beside is not None
    settings = None if one.beside_settings is None else Path(one.beside_settings)
    second = build_beside(one.beside, model, tokenizer, settings)
    sharing = None
    if one.sharing_settings is not None:
        sharing = load_settings(CombinedSettings, Path(one.sharing_settings))
    return combined_drafter(first, second, model, tokenizer, sharing, tree)


def _with_repeats(one: MethodName, decoder: SpeculativeDecoder) -> SpeculativeDecoder:
    if one.merged_repeats is None:
        return decoder
    assert decoder.drafter is not None, "refused when the name was parsed"
    repeating = RepeatingDrafter(decoder.drafter, RepeatSettings(num_nodes=one.merged_repeats))
    return SpeculativeDecoder(decoder.target.model, repeating, decoder.tokenizer)


def _assistant(place: str, model: PreTrainedModel) -> PreTrainedModel:
    assistant = _load_model(place, model.dtype, model.device, "the assistant")
    own, other = (one.config.get_text_config().vocab_size for one in (model, assistant))
    if own != other:
        raise ConfigError(
            f"the assistant {place} has another vocabulary than the target",
            expected=f"{own} tokens",
            got=other,
            remedy="use a model with the target's own tokenizer",
        )
    return assistant


def _load_model(
    place: str, dtype: str | torch.dtype, device: torch.device, what: str
) -> PreTrainedModel:
    model: Any = load_causal_lm(place, what, dtype=dtype)
    return model.to(device).eval()


_BUILDERS: dict[str, Callable[..., list[Method]]] = {
    TRANSFORMERS: _transformers,
    LOOKUP: _lookup,
    ASSISTED: _assisted,
    PLAIN: _plain,
    DRAFTER: _drafted,
    **dict.fromkeys(UNTRAINED, _untrained),
}
