"""Loads a drafter together with the target and tokenizer that it was trained for."""

from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from jakiro.drafter import JakiroDrafter
from jakiro.errors import CheckpointError


def load_parts(
    drafter: str | Path, target: str | Path | None, **load: Any
) -> tuple[PreTrainedModel, JakiroDrafter, PreTrainedTokenizerBase]:
    """Return target, drafter and tokenizer.

    Args:
        drafter: folder or hub name of the drafter.
        target: where the target is now, if not where the drafter's config says.
        **load: for `AutoModelForCausalLM.from_pretrained`.

    Raises:
        CheckpointError: one of them cannot be loaded.
    """
    model = JakiroDrafter.from_pretrained(drafter)
    place = str(target or model.config.target_record.name_or_path)
    try:
        target_model = AutoModelForCausalLM.from_pretrained(place, **load)
        tokenizer = AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot load the target {place}",
            expected="the target that the drafter was trained for",
            got=str(error).strip().splitlines()[0],
            remedy="pass target= with the place where it is now",
        ) from error
    return target_model, model, tokenizer


def tokenizer_at(place: str) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer that lies in a folder or in the hub's cache here, if there is one."""
    try:
        return AutoTokenizer.from_pretrained(place, local_files_only=True)
    except (OSError, ValueError):
        return None
