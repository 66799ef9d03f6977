"""The text of single tokens."""

from functools import lru_cache

from transformers import PreTrainedTokenizerBase


@lru_cache(1 << 17)
def text_of_token(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str:
    """Return the text of a single token, special tokens included."""
    return str(tokenizer.decode([token_id]))
