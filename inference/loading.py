"""Loads a drafter together with the target and tokenizer that it was trained for."""

from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.drafters.aded.drafter import AdedDrafter
from inference.drafters.lookup import LookupDrafter
from inference.drafters.registry import (
    PairName,
    UntrainedName,
    build_beside,
    build_untrained,
)
from inference.protocol import Drafter
from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from jakiro.utils.pretrained import load_causal_lm, load_tokenizer


class Parts(NamedTuple):
    """What a decoder is made of."""

    target: PreTrainedModel
    drafter: JakiroDrafter | Drafter
    tokenizer: PreTrainedTokenizerBase
    beside: AdedDrafter | LookupDrafter | None = None  # that shares trees with the drafter


def load_parts(drafter: str | Path, target: str | Path | None, **load: Any) -> Parts:
    """Return target, drafter and tokenizer.

    Args:
        drafter: folder or hub name of the drafter; or `aded`, `aded=TABLE`, `lookup`, `lm=MODEL`;
            or two of them, as `aded+drafter=DRAFTER` or `lookup+lm=MODEL`.
        target: where the target is now, if not where the drafter's config says.
        **load: for `jakiro.utils.pretrained.load_causal_lm`.

    Raises:
        CheckpointError: one of them cannot be loaded.
        ConfigError: the drafter names no target, and none is given.
        TargetMismatch: a table of trigrams or a small model has another tokenizer.
    """
    if (pair := PairName.parse(str(drafter))) is not None:
        parts = load_parts(pair.first.removeprefix("drafter="), target, **load)
        return parts._replace(beside=build_beside(pair.beside, parts.target, parts.tokenizer))
    if UntrainedName.parse(str(drafter)) is not None:
        if target is None:
            raise ConfigError(
                f"the drafter {drafter} serves any target and names none",
                expected="the place of a target",
                got="none",
                remedy="pass target=, or --target on the command line",
            )
        return parts_over(str(drafter), *_load_target(str(target), load))
    model = JakiroDrafter.from_pretrained(drafter)
    target_model, tokenizer = _load_target(
        str(target or model.config.target_record.name_or_path), load
    )
    return Parts(target_model, model, tokenizer)


def parts_over(drafter: str, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Parts:
    """Return a target that is loaded, and drafters for it; names and errors as for `load_parts`.

    Args:
        drafter: its name.
        target: where it shall compute.
        tokenizer: of the target.
    """
    if (pair := PairName.parse(drafter)) is not None:
        parts = parts_over(pair.first.removeprefix("drafter="), target, tokenizer)
        return parts._replace(beside=build_beside(pair.beside, target, tokenizer))
    if (untrained := UntrainedName.parse(drafter)) is not None:
        return Parts(target, build_untrained(untrained, target, tokenizer), tokenizer)
    return Parts(target, JakiroDrafter.from_pretrained(drafter), tokenizer)


def _load_target(
    name_or_path: str, load: dict[str, Any]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    remedy = "pass target= with the place where it is now"
    return (
        load_causal_lm(name_or_path, remedy=remedy, **load),
        load_tokenizer(name_or_path, "the tokenizer of the target", remedy=remedy),
    )
