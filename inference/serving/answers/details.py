"""Texts and bytes of single tokens, and the details of a stream: origins of tokens, and trees."""

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from inference.engine.decode_step import TARGET, DecodeStep, VerifiedTree
from jakiro.utils.token_text import REPLACEMENT

_TARGET_NAME = "target"
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
    match = _BYTE_TOKEN.fullmatch(name)
    data = bytes.fromhex(match[1]) if match else bytes(_BYTES[c] for c in name if c in _BYTES)
    return tuple(data) if data.decode(errors="replace") == text else None


class DetailWriter:
    """Names of tokens, trees and proposers in JSON data.

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


class DetailLog:
    """Collects the details of one choice, as JSON data, while its text grows.

    Args:
        started: `time.monotonic()` at the arrival of the request.
    """

    def __init__(self, writer: DetailWriter, index: int, started: float) -> None:
        self._writer = writer
        self._index = index
        self._started = started
        self._num_steps = 0
        self._text = ""  # final text that is not divided among tokens yet
        self._start = 0  # number of characters before this text
        self._tokens: list[dict[str, Any]] = []  # those of this text, without their parts of it
        self._offsets: list[int] = []  # number of characters before each of these tokens
        self._steps: list[dict[str, Any]] = []

    def add(self, step: DecodeStep, offsets: Sequence[int]) -> None:
        """Add a decoding step.

        Args:
            offsets: number of characters before each token of the step.
        """
        assert step.details is not None
        tree = step.details.tree
        assert tree is not None
        origins = zip(step.token_ids, step.depths, step.proposer_ids, strict=True)
        self._tokens += [
            {
                "id": token,
                "text": "",
                "step": self._num_steps,  # 0 for the token that the prefill selected
                "depth": depth,  # 0 if the target itself selected the token
                "source": self._writer.source(proposer),
            }
            for token, depth, proposer in origins
        ]
        self._offsets += offsets
        self._steps.append(
            {
                "step": self._num_steps,
                "seconds": round(step.emitted_at - self._started, 6),
                "emitted": len(step.token_ids),
                "drafted": len(tree.token_ids),
                "accepted": len(tree.path),
                "tree": self._writer.tree(tree),
            }
        )
        self._num_steps += 1

    def take(self, text: str, is_final: bool) -> dict[str, Any] | None:
        """Return what is known by now, and forget it; None if there is nothing.

        Args:
            is_final: whether no character of the tokens so far is held back.
        """
        self._text += text
        tokens = self._divide() if is_final else []
        steps, self._steps = self._steps, []
        if not tokens and not steps:
            return None
        return {"index": self._index, "tokens": tokens, "steps": steps}

    def _divide(self) -> list[dict[str, Any]]:
        """Return the tokens; their parts of the text, joined, are the text of the choice."""
        length = len(self._text)
        inner = (min(max(offset - self._start, 0), length) for offset in self._offsets[1:])
        bounds = [*accumulate([0, *inner], max), length] if self._tokens else []
        divided = [
            {**token, "text": self._text[start:end]}
            for token, (start, end) in zip(self._tokens, pairwise(bounds), strict=True)
        ]
        self._start += length
        self._text, self._tokens, self._offsets = "", [], []
        return divided


def _round(probability: float) -> float | None:
    """Return a probability with four decimals; None if it is not a number."""
    return round(probability, 4) if math.isfinite(probability) else None
