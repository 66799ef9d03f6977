"""The text of single tokens, and their bytes, which together are the bytes of an answer."""

import re
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from jakiro.utils.token_text import REPLACEMENT

_MOST_TOKENS = 1 << 17  # largest number of tokens whose text is kept
# Two usual names of bytes: <0xC3>; and, with byte-level BPE, characters that stand for themselves,
# or those from U+0100 on for the other bytes.
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(0x100) if byte not in _VISIBLE]
_BYTES = dict(zip(map(chr, [*_VISIBLE, *range(0x100, 0x144)]), _VISIBLE + _OTHERS, strict=True))


@lru_cache(_MOST_TOKENS)
def text_of_token(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str:
    """Return the text of a single token, special tokens included."""
    return str(tokenizer.decode([token_id]))


@lru_cache(_MOST_TOKENS)
def bytes_of_token(tokenizer: PreTrainedTokenizerBase, token_id: int) -> tuple[int, ...] | None:
    """Return the bytes that a token adds to an answer; None if they are unknown or there are none.

    A special token has none. The bytes of a part of a character are those that the token's name
    stands for.
    """
    text = str(tokenizer.decode([token_id], skip_special_tokens=True))
    if REPLACEMENT not in text:
        return tuple(text.encode()) or None
    name = str(tokenizer.convert_ids_to_tokens(token_id))
    found = _BYTE_TOKEN.fullmatch(name)
    known = bytes(_BYTES[each] for each in name if each in _BYTES)
    own = bytes.fromhex(found[1]) if found else known
    return tuple(own) if own.decode(errors="replace") == text else None
