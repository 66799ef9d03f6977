"""Comparison of a server's greedy texts with the tokens of the target's own `generate()`.

Servers with OpenAI's interface return texts, not token ids. The target's tokens count as equal as
long as the server's text begins with their text. At the first difference, the server's token is
assumed to be the likeliest one that agrees with its text.
"""

from collections.abc import Iterable, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from inference.client.answer import ServerAnswer
from inference.generation.incremental_text import REPLACEMENT
from inference.losslessness.reference import Reference, Tokens, rounding
from inference.losslessness.server.records import GreedyTextCheck, TextDifference

_MOST_CANDIDATES = 200  # likeliest tokens among which the server's token is searched


def compare_greedy(
    references: Sequence[Reference],
    answers: Sequence[ServerAnswer],
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int,
) -> GreedyTextCheck:
    """Compare the server's greedy texts with the target's own.

    Args:
        references: reference of each prompt.
        answers: complete answer to each prompt.
        tokenizer: the target's tokenizer.
        max_new_tokens: largest number of new tokens that was requested.
    """
    compared = [
        _Comparison(reference, tokenizer, answer, reference.greedy(max_new_tokens))
        for reference, answer in zip(references, answers, strict=True)
    ]
    numbered = enumerate(compared, start=1)
    return GreedyTextCheck(
        prompts=len(compared),
        tokens=sum(comparison.num_equal for comparison in compared),
        drafted=drafted_in(answers),
        differences=tuple(own.difference(n) for n, own in numbered if not own.is_equal),
    )


def drafted_in(answers: Iterable[ServerAnswer]) -> int | None:
    """Return the number of accepted drafts in answers; None if the server does not report it."""
    counts = [answer.usage.accepted for answer in answers if answer.usage is not None]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


class _Comparison:
    """One text of the server beside the target's own tokens.

    Args:
        reference: the target's reference for the prompt.
        tokenizer: the target's tokenizer.
        answer: the server's answer.
        expected: the target's own greedy tokens.
    """

    def __init__(
        self,
        reference: Reference,
        tokenizer: PreTrainedTokenizerBase,
        answer: ServerAnswer,
        expected: Tokens,
    ) -> None:
        self._reference = reference
        self._tokenizer = tokenizer
        self._expected = expected
        self._is_ended = bool(expected) and reference.ends(expected[-1])
        self._content = expected[:-1] if self._is_ended else expected
        self._own = self._text(self._content)
        self._text_ends = answer.finish_reason == "stop"
        # Some tokenizers drop a space at the beginning of a text, and some servers keep it.
        keeps = answer.text.startswith(" ") and not self._own.startswith(" ")
        self._got = answer.text[1:] if keeps else answer.text
        self.is_equal = (self._own, self._is_ended) == (self._got, self._text_ends)
        self.num_equal = len(expected) if self.is_equal else self._num_common()

    def difference(self, number: int) -> TextDifference:
        """Return the first difference.

        Args:
            number: number of the prompt, from 1.
        """
        prefix = self._content[: self.num_equal]
        before = len(self._text(prefix).rstrip(REPLACEMENT))
        target = self._expected[len(prefix)] if len(prefix) < len(self._expected) else None
        scores = self._reference.greedy_scores(prefix)
        server = self._server_token(prefix, scores, before)
        gap, rounded = None, 0.0
        if target is not None and server is not None:
            pair = [float(scores[target]), float(scores[server])]
            gap, rounded = abs(pair[0] - pair[1]), rounding(self._reference.model.dtype, pair)
        return TextDifference(
            prompt=number,
            position=len(prefix) + 1,
            target_token=target,
            server_token=server,
            target_text=self._own[before:],
            server_text=self._got[before:],
            gap=gap,
            rounding=rounded,
        )

    def _num_common(self) -> int:
        """Return the number of the target's tokens with whose text the server's text begins."""
        sizes = range(len(self._content), 0, -1)
        return next((size for size in sizes if self._agrees(self._content[:size])), 0)

    def _agrees(self, token_ids: Tokens) -> bool:
        """Return whether the server's text can begin with the text of tokens."""
        text = self._text(token_ids)
        complete = text.rstrip(REPLACEMENT)
        if not self._got.startswith(complete):
            return False
        # The tokens may end in the middle of a character, which is not one of ASCII.
        following = self._got[len(complete) : len(complete) + 1]
        return text == complete or (following != "" and not following.isascii())

    def _server_token(self, prefix: Tokens, scores: torch.Tensor, before: int) -> int | None:
        """Return the likeliest token that continues a prefix to the server's text."""
        best = scores.topk(min(_MOST_CANDIDATES, len(scores))).indices.tolist()
        if len(self._got) == before and self._text_ends:
            return next((token for token in best if self._reference.ends(token)), None)
        for token in best:
            has_text = self._text((*prefix, token)) != self._text(prefix)
            if has_text and token != self._next(prefix) and self._agrees((*prefix, token)):
                return int(token)
        return None

    def _next(self, prefix: Tokens) -> int | None:
        return self._expected[len(prefix)] if len(prefix) < len(self._expected) else None

    def _text(self, token_ids: Tokens) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))
