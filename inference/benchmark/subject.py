"""Loading of the target of a comparison, and construction of the compared methods."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.benchmark.method_names import (
    ASSISTED,
    AUTOREGRESSIVE,
    DRAFTER,
    LOOKUP,
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

LOOKUP_TOKENS = (3, 5, 10)  # tokens drafted per forward pass; only the fastest setting is reported


def load_target(
    name_or_path: str, dtype: str | torch.dtype, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a target and its tokenizer.

    Args:
        name_or_path: folder or Hub id.
        dtype: dtype of the weights; "auto" for the dtype of the checkpoint.
        device: device of the target.

    Raises:
        CheckpointError: the model or the tokenizer cannot be loaded.
    """
    model = load_causal_lm(name_or_path, dtype=dtype, device=device)
    return model, load_tokenizer(name_or_path, "the tokenizer of the target")


def build_methods(
    names: Sequence[MethodName],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    trial: Trial | None = None,
) -> list[Method]:
    """Return the methods.

    A method of which only the fastest setting is reported (such as prompt lookup) yields one
    `Method` per setting, all with the same `family`.

    Args:
        names: parsed names of the methods.
        model: the target.
        tokenizer: tokenizer of the target.
        trial: trial that selects trees by measured costs, as returned by `trial_for`; None if no
            method needs a trial.

    Raises:
        CheckpointError: a drafting model or table cannot be loaded.
        TargetMismatch: a drafter belongs to a different target.
        ConfigError: the vocabulary of a drafting model differs from the target's, or settings
            cannot be used.
    """
    trial = trial or Trial()
    return [
        method for name in names for method in _BUILDERS[name.kind](name, model, tokenizer, trial)
    ]


def _transformers(name: MethodName, model: PreTrainedModel, *_: object) -> list[Method]:
    return [TransformersDecoding(name.name, name.kind, model)]


def _lookup(name: MethodName, model: PreTrainedModel, *_: object) -> list[Method]:
    return [
        TransformersDecoding(
            f"{name.name} ({count})",
            name.kind,
            model,
            family=name.name,
            note=f"prompt_lookup_num_tokens={count}",
            prompt_lookup_num_tokens=count,
        )
        for count in LOOKUP_TOKENS
    ]


def _assisted(name: MethodName, model: PreTrainedModel, *_: object) -> list[Method]:
    assistant = _assistant(str(name.path), model)
    return [TransformersDecoding(name.name, name.kind, model, assistant_model=assistant)]


def _autoregressive(
    name: MethodName, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, _: object
) -> list[Method]:
    return [OwnDecoding(name.name, name.kind, SpeculativeDecoder(model, tokenizer=tokenizer))]


def _drafted(
    name: MethodName, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, trial: Trial
) -> list[Method]:
    drafter = JakiroDrafter.from_pretrained(str(name.path))
    decoder = SpeculativeDecoder(model, drafter, tokenizer)
    plan = trial.plan(name, decoder, drafter)
    if name.beside is not None:
        both = _combined(name, drafter, model, tokenizer, plan)
        decoder = SpeculativeDecoder(model, both, tokenizer)
    elif plan is not None:
        decoder = SpeculativeDecoder(model, drafter, tokenizer, plan)
    return [OwnDecoding(name.name, name.kind, _with_repeats(name, decoder), trial.note(name))]


def _untrained(
    name: MethodName, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, _: object
) -> list[Method]:
    settings = None if name.settings is None else Path(name.settings)
    assert name.candidates != "costs", "rejected when the name was parsed"
    untrained = UntrainedName(name.kind, name.path, settings, name.candidates)
    drafter: Drafter = build_untrained(untrained, model, tokenizer)
    if name.beside is not None:
        assert isinstance(drafter, SmallLMDrafter), "checked when the name was parsed"
        drafter = _combined(name, drafter, model, tokenizer)
    decoder = SpeculativeDecoder(model, drafter, tokenizer)
    return [OwnDecoding(name.name, name.kind, _with_repeats(name, decoder))]


def _combined(
    name: MethodName,
    first: JakiroDrafter | SmallLMDrafter,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tree: Trees | None = None,
) -> CombinedDrafter:
    """Return the drafter of a method in which two drafters share the trees."""
    assert name.beside is not None
    settings = None if name.beside_settings is None else Path(name.beside_settings)
    second = build_beside(name.beside, model, tokenizer, settings)
    sharing = None
    if name.sharing_settings is not None:
        sharing = load_settings(CombinedSettings, Path(name.sharing_settings))
    return combined_drafter(first, second, model, tokenizer, sharing, tree)


def _with_repeats(name: MethodName, decoder: SpeculativeDecoder) -> SpeculativeDecoder:
    if name.merged_repeats is None:
        return decoder
    assert decoder.drafter is not None, "rejected when the name was parsed"
    repeating = RepeatingDrafter(decoder.drafter, RepeatSettings(num_nodes=name.merged_repeats))
    return SpeculativeDecoder(decoder.target.model, repeating, decoder.tokenizer)


def _assistant(path: str, model: PreTrainedModel) -> PreTrainedModel:
    assistant = load_causal_lm(path, "the assistant", dtype=model.dtype, device=model.device)
    own, other = (each.config.get_text_config().vocab_size for each in (model, assistant))
    if own != other:
        raise ConfigError(
            f"the assistant {path} has a different vocabulary from the target",
            expected=f"a vocabulary of {own} tokens",
            got=other,
            remedy="use an assistant with the target's tokenizer",
        )
    return assistant


_BUILDERS: dict[str, Callable[..., list[Method]]] = {
    TRANSFORMERS: _transformers,
    LOOKUP: _lookup,
    ASSISTED: _assisted,
    AUTOREGRESSIVE: _autoregressive,
    DRAFTER: _drafted,
    **dict.fromkeys(UNTRAINED, _untrained),
}
