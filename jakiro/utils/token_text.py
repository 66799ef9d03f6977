"""Text of token ids: whole characters survive beside bytes that are none."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # stands for bytes that are not a character


class _ByteTokens(NamedTuple):
    byte_of: dict[int, int]
    token_of: dict[int, int]
    special: frozenset[int]


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the length of the longest beginning that two texts or lists of tokens share."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def text_of_tokens(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], *, skips_special: bool = True
) -> str:
    """Return the text of tokens, with U+FFFD for each incomplete or invalid character.

    Tokenizers with byte fallback, such as Llama 2's, would replace every byte of a run of byte
    tokens if a single one is invalid.
    """
    table = _byte_tokens(tokenizer)
    ids = list(token_ids)
    if table is not None and not table.byte_of.keys().isdisjoint(ids):
        hidden = table.special if skips_special else ()
        ids = _repair([token for token in ids if token not in hidden], table)
    return str(tokenizer.decode(ids, skip_special_tokens=skips_special))


def _repair(token_ids: Sequence[int], table: _ByteTokens) -> list[int]:
    """Replace invalid bytes by those of U+FFFD."""
    repaired: list[int] = []
    for is_bytes, run in groupby(token_ids, key=lambda token: token in table.byte_of):
        ids = list(run)
        if is_bytes:
            text = bytes(table.byte_of[token] for token in ids).decode(errors="replace")
            ids = [table.token_of[byte] for byte in text.encode()]
        repaired += ids
    return repaired


@lru_cache(8)
def _byte_tokens(tokenizer: PreTrainedTokenizerBase) -> _ByteTokens | None:
    """Return the tokens that a tokenizer joins to characters; None if it does not."""
    vocabulary = tokenizer.get_vocab()
    names = {byte: f"<0x{byte:02X}>" for byte in range(256)}
    token_of = {byte: vocabulary[name] for byte, name in names.items() if name in vocabulary}
    if not token_of.keys() >= set(REPLACEMENT.encode()):
        return None
    if tokenizer.decode([token_of[byte] for byte in REPLACEMENT.encode()]) != REPLACEMENT:
        return None
    added = tokenizer.added_tokens_decoder
    special = frozenset(token for token, text in added.items() if text.special)
    return _ByteTokens({token: byte for byte, token in token_of.items()}, token_of, special)
