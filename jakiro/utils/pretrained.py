"""Causal LMs and tokenizers from folders or the hub, with errors that name what is missing."""

from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from jakiro.errors import CheckpointError


def load_causal_lm(place: str, what: str, **load: Any) -> PreTrainedModel:
    """Return the causal LM in a folder or of the hub.

    Args:
        place: of the model.
        what: it is, for the error message.
        **load: for `AutoModelForCausalLM.from_pretrained`.

    Raises:
        CheckpointError: it cannot be loaded.
    """
    try:
        return AutoModelForCausalLM.from_pretrained(place, **load)
    except (OSError, ValueError) as error:
        raise _cannot_load(what, place, error) from error


def load_tokenizer(place: str, what: str = "a tokenizer from") -> PreTrainedTokenizerBase:
    """Return the tokenizer in a folder or of the hub.

    Args:
        place: of the tokenizer.
        what: it is, for the error message.

    Raises:
        CheckpointError: it cannot be loaded.
    """
    try:
        return AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError) as error:
        raise _cannot_load(what, place, error) from error


def _cannot_load(what: str, place: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"cannot load {what} {place}",
        expected="a folder or hub id of a causal LM with its tokenizer",
        got=str(error).strip().splitlines()[0],
        remedy="check the path",
    )
