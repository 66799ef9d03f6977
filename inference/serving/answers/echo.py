"""Prompts at the beginning of texts, with the offset of each token."""

from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from inference.generation.incremental_text import IncrementalText
from inference.generation.prompts import Prompt


class Echo(NamedTuple):
    """A prompt that a text begins with.

    Attributes:
        text: text of the prompt.
        offsets: for each token, the number of characters before it.
    """

    text: str
    offsets: list[int]


def echo_of(prompt: Prompt, token_ids: list[int], tokenizer: PreTrainedTokenizerBase) -> Echo:
    """Return the text of a prompt with the offsets of its tokens.

    If the prompt is a text, and the text of its tokens equals the prompt, except for tokens that
    the tokenizer adds at the beginning, the prompt itself is returned. Otherwise, the text of the
    tokens is returned.

    Args:
        prompt: prompt of a request.
        token_ids: tokens of the prompt.
        tokenizer: the target's tokenizer.
    """
    if isinstance(prompt, str):
        text, offsets = _decoded(token_ids, tokenizer, skips_special=False)
        if text.endswith(prompt):
            added = len(text) - len(prompt)
            return Echo(prompt, [max(offset - added, 0) for offset in offsets])
    return Echo(*_decoded(token_ids, tokenizer, skips_special=True))


def _decoded(
    token_ids: list[int], tokenizer: PreTrainedTokenizerBase, *, skips_special: bool
) -> tuple[str, list[int]]:
    """Return the text of tokens, and the number of characters before each of them."""
    growing = IncrementalText(tokenizer, skips_special=skips_special)
    text, offsets = "", []
    for token_id in token_ids:
        text += growing.push(token_id)
        offsets.append(growing.offset)
    return text + growing.flush(), offsets
