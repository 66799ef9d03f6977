"""Texts and bytes of single tokens, and the details of a stream: origins of tokens, and trees."""

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from inference.engine.decode_step import TARGET, DecodeStep, VerifiedTree
from jakiro.utils.token_text import REPLACEMENT

_TARGET_NAME = "target"
_MOST_TOKENS = 1 << 17  # largest number of tokens whose text is kept
# Two usual names of bytes: <0xC3>; and the characters of byte-level BPE.
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}


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
    match = _BYTE_TOKEN.fullmatch(name)
    data = bytes.fromhex(match[1]) if match else bytes(_BYTES[c] for c in name if c in _BYTES)
    return tuple(data) if data.decode(errors="replace") == text else None


class DetailWriter:
    """The details of decoding steps as JSON data.

    Attributes:
        hides_rejected: whether rejected drafts are left out, because the drafter has learned from
            texts of other users, which they may repeat.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, names: Sequence[str]) -> None:
        self.hides_rejected = False
        self._tokenizer = tokenizer
        self._names = tuple(names)

    def source(self, proposer_id: int) -> str:
        if proposer_id == TARGET:
            return _TARGET_NAME
        has_name = proposer_id < len(self._names)
        return self._names[proposer_id] if has_name else f"source {proposer_id}"

    def step(
        self, step: DecodeStep, number: int, texts: Sequence[str], seconds: float
    ) -> dict[str, Any]:
        """Return the details of a decoding step.

        Args:
            number: number of the step; 0 for the prefill.
            texts: final text that each token adds; several tokens of one character, or of what may
                be a stop string, add it with the last of them.
            seconds: time from the arrival of the request.
        """
        assert step.details is not None
        tree = step.details.tree
        assert tree is not None
        origins = zip(step.token_ids, texts, step.depths, step.proposer_ids, strict=True)
        tokens = [
            {
                "id": token,
                "text": text,
                "step": number,
                "depth": depth,  # 0 if the target itself selected the token
                "source": self.source(proposer),
            }
            for token, text, depth, proposer in origins
        ]
        entry = {
            "step": number,
            "seconds": round(seconds, 6),
            "emitted": len(step.token_ids),
            "drafted": len(tree.token_ids),
            "accepted": len(tree.path),
            "tree": self.tree(tree),
        }
        return {"tokens": tokens, "steps": [entry]}

    def tree(self, tree: VerifiedTree) -> dict[str, Any]:
        accepted = set(tree.path)
        shown = tree.path if self.hides_rejected else range(len(tree.token_ids))
        index = {node: number for number, node in enumerate(shown)}
        nodes = [
            {
                "text": self._text(tree.token_ids[node]),
                "parent": index.get(tree.parents[node], tree.parents[node]),
                "accepted": node in accepted,
                "probability": _round(tree.target_probs[node]),
                "source": self.source(tree.proposer_ids[node]),
            }
            for node in shown
        ]
        next_text = None if tree.next_token is None else self._text(tree.next_token)
        return {"root": self._text(tree.root), "nodes": nodes, "next": next_text}

    def _text(self, token_id: int) -> str:
        return text_of_token(self._tokenizer, token_id)


def _round(probability: float) -> float | None:
    return round(probability, 4) if math.isfinite(probability) else None
