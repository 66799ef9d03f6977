"""The text of single tokens, and their bytes, which together are the bytes of an answer."""

import re
from functools import cache, lru_cache

from transformers import PreTrainedTokenizerBase

from inference.generation.incremental_text import REPLACEMENT

_MOST_TOKENS = 1 << 17  # largest number of tokens whose text is kept
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


@lru_cache(_MOST_TOKENS)
def text_of_token(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str:
    """Return the text of a single token, special tokens included.

    Args:
        tokenizer: the target's tokenizer.
        token_id: token.
    """
    return str(tokenizer.decode([token_id]))


@lru_cache(_MOST_TOKENS)
def bytes_of_token(tokenizer: PreTrainedTokenizerBase, token_id: int) -> tuple[int, ...] | None:
    """Return the bytes that a token adds to an answer; None if they are unknown or there are none.

    A special token has a name, but no bytes, because answers do not contain it. A token may have
    only some bytes of a character, from which its text cannot be read.

    Args:
        tokenizer: the target's tokenizer.
        token_id: token.
    """
    text = str(tokenizer.decode([token_id], skip_special_tokens=True))
    if not text:
        return None
    if REPLACEMENT not in text:
        return tuple(text.encode())
    found = _bytes_of_name(str(tokenizer.convert_ids_to_tokens(token_id)))
    is_right = found is not None and found.decode(errors="replace") == text
    return tuple(found) if found is not None and is_right else None


def _bytes_of_name(name: str) -> bytes | None:
    """Return the bytes that the name of a token stands for, in the two usual ways of naming."""
    if found := _BYTE_TOKEN.fullmatch(name):
        return bytes.fromhex(found[1])
    known = _byte_of_character()
    return bytes(known[each] for each in name) if all(each in known for each in name) else None


@cache
def _byte_of_character() -> dict[str, int]:
    """Return the bytes by the characters that stand for them in tokenizers with byte-level BPE.

    Visible characters of Latin-1 stand for themselves, and those from U+0100 on for the others.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in visible]
    own = {chr(byte): byte for byte in visible}
    return own | {chr(0x100 + number): byte for number, byte in enumerate(others)}
