"""Grammars that a text must follow, as masks of the tokens that may come next."""

import re
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from pydantic import BaseModel
from torch import Tensor
from transformers import (
    LogitsProcessor,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    StoppingCriteria,
)

from jakiro.errors import ConfigError, PromptError
from jakiro.utils.packaged import require_extra
from jakiro.utils.token_text import common_length

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

GrammarSource: TypeAlias = Mapping[str, Any] | type[BaseModel] | re.Pattern[str] | str
"""A JSON schema, or a pydantic class that has one; a regular expression; or a grammar in the
variant of Lark that llguidance reads."""

# Between the tokens of JSON: at most a space, or a line break with its indentation. A model that
# is unsure of what follows may otherwise write spaces until its text is full.
WHITESPACE = r"[\x20\t]|\n[\x20\t]{0,40}"
_MOST_COMPILED = 64


class GrammarProcessor(LogitsProcessor):
    """Excludes tokens after which no text of a grammar could follow.

    An end-of-sequence token is possible exactly where the text is complete. The processor belongs
    to one sequence, whose tokens may be passed in any order: a matcher moves to those of each call.
    """

    def __init__(self, matcher: "LLMatcher", num_tokens: int, own_end: int) -> None:
        self._start = matcher
        self._num_tokens, self._own_end = num_tokens, own_end
        self._begin(0, ())

    @classmethod
    def compile(
        cls, source: GrammarSource, tokenizer: PreTrainedTokenizerBase
    ) -> "GrammarProcessor":
        """Return the processor of a grammar, to be passed to each sequence by `for_sequence`.

        Raises:
            PromptError: the grammar is not valid or contains what llguidance does not support, the
                tokenizer is not a fast one, or llguidance is not installed.
        """
        try:
            require_extra("grammar")
        except ConfigError as error:
            raise PromptError(str(error)) from error
        from llguidance import LLMatcher

        if isinstance(source, type):
            source = source.model_json_schema()
        try:
            if isinstance(source, re.Pattern):
                text = LLMatcher.grammar_from_regex(_in_rust(source))
            elif isinstance(source, str):
                text = LLMatcher.grammar_from_lark(source)
            else:
                defaults: Any = {"whitespace_pattern": WHITESPACE}
                text = LLMatcher.grammar_from_json_schema(dict(source), defaults=defaults)
        except (TypeError, ValueError) as error:
            raise _unusable(str(error)) from error
        num_tokens = _tokens_of(tokenizer).vocab_size
        return cls(_matcher(text, tokenizer), num_tokens, _own_end(tokenizer))

    def for_sequence(self, prompt_length: int, end_ids: Collection[int]) -> "GrammarProcessor":
        """Return the processor of a sequence whose prompt has this number of tokens."""
        fresh = copy(self)
        fresh._begin(prompt_length, end_ids)
        return fresh

    def _begin(self, prompt_length: int, end_ids: Collection[int]) -> None:
        self.prompt_length, self.end_ids = prompt_length, frozenset(end_ids)
        self._matcher = self._start.deep_copy()
        self._read: list[int] = []  # tokens that the matcher has read
        self._root: list[int] = []  # new tokens up to the root of the next tree

    def __call__(
        self, input_ids: Int[Tensor, "1 tokens"], scores: Float[Tensor, "1 vocab"]
    ) -> Float[Tensor, "1 vocab"]:
        (token_ids,) = input_ids[:, self.prompt_length :].tolist()
        if self.is_complete(token_ids):  # what follows is not part of the text
            return scores
        forbidden = torch.from_numpy(~self._allowed(token_ids, scores.shape[1]))
        return scores.masked_fill(forbidden.to(scores.device), -torch.inf)

    def is_complete(self, token_ids: Sequence[int]) -> bool:
        """Return whether new tokens are a text after which nothing can follow."""
        if not self.end_ids.isdisjoint(token_ids):
            return True
        return self._follow(token_ids) and self._matcher.is_stopped()

    def set_root(self, token_ids: Sequence[int]) -> None:
        """Let the paths of `below_root` begin after all tokens of the sequence."""
        self._root = list(token_ids[self.prompt_length :])

    def below_root(self, path: Sequence[int], size: int) -> Bool[np.ndarray, " vocab"]:
        """Return which of the first `size` tokens may be drafted after a path; none at its end."""
        token_ids = [*self._root, *path]
        if self.is_complete(token_ids):
            return np.zeros(size, bool)
        return self._allowed(token_ids, size)

    def allows(self, path: Sequence[int]) -> bool:
        """Return whether the path below the root is the beginning of a text, or a whole text."""
        *before, last = [*self._root, *path]
        if last in self.end_ids:
            return self._follow(before) and self._matcher.is_accepting()
        return self.end_ids.isdisjoint(before) and self._follow([*before, last])

    def _allowed(self, token_ids: Sequence[int], size: int) -> Bool[np.ndarray, " vocab"]:
        allowed = np.zeros(size, bool)
        if not self._follow(token_ids):
            return allowed
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        count = min(size, self._num_tokens)
        allowed[:count] = np.unpackbits(bits, count=count, bitorder="little")
        allowed[self._own_end : self._own_end + 1] = False
        allowed[[end for end in self.end_ids if end < size]] = self._matcher.is_accepting()
        return allowed if self._is_sound() else np.zeros(size, bool)

    def _follow(self, token_ids: Sequence[int]) -> bool:
        """Move the matcher to these tokens, as far as the grammar allows; return whether it does.

        Most calls differ only below the root.
        """
        known = len(self._root)
        if self._read[:known] != self._root or token_ids[:known] != self._root:
            known = 0
        known += common_length(self._read[known:], token_ids[known:])
        if known < len(self._read):
            self._matcher.rollback(len(self._read) - known)
        new = list(takewhile(lambda token: token < self._num_tokens, token_ids[known:]))
        count = self._matcher.try_consume_tokens(new)
        self._read = [*self._read[:known], *new[:count]]
        return self._is_sound() and len(self._read) == len(token_ids)

    def _is_sound(self) -> bool:
        """Return whether the matcher has met no limit of llguidance; replace one that has.

        What is too complex is not drafted. A sequence fails if its own tokens are.
        """
        if self._matcher.is_error():
            self._matcher, self._read = self._start.deep_copy(), []
            _matcher.cache_clear()  # copies may share what has met the limit
            return False
        return True


class GrammarEnd(StoppingCriteria):
    """Ends a sequence after which its grammar allows nothing more."""

    def __init__(self, grammar: GrammarProcessor) -> None:
        self.grammar = grammar

    def __call__(
        self, input_ids: Int[Tensor, "1 tokens"], scores: object, **_: Any
    ) -> Bool[Tensor, " 1"]:
        new: list[int] = input_ids[0, self.grammar.prompt_length :].tolist()
        return torch.tensor([self.grammar.is_complete(new)], device=input_ids.device)


def _in_rust(regex: re.Pattern[str]) -> str:
    """Return a regular expression with its flags, whose letters are those of Python."""
    known = {"a": re.ASCII, "i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "x": re.VERBOSE}
    flags = "".join(letter for letter, flag in known.items() if regex.flags & flag)
    return f"(?{flags}){regex.pattern}" if flags else regex.pattern


def _own_end(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that ends texts for llguidance, which needs one; the sequences' differ."""
    end: Any = tokenizer.eos_token_id
    return len(tokenizer) - 1 if end is None else int(end)


@lru_cache(8)
def _tokens_of(tokenizer: PreTrainedTokenizerBase) -> "LLTokenizer":
    """Return the bytes of all tokens; this takes a second for a large vocabulary."""
    from llguidance.hf import from_tokenizer

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise PromptError(
            "grammars need a fast tokenizer", got=f"a tokenizer in Python, {type(tokenizer)}"
        )
    return from_tokenizer(tokenizer, eos_token=_own_end(tokenizer))


@lru_cache(_MOST_COMPILED)
def _matcher(grammar: str, tokenizer: PreTrainedTokenizerBase) -> "LLMatcher":
    """Return the matcher of a grammar at the beginning of a text."""
    from llguidance import LLMatcher

    matcher = LLMatcher(_tokens_of(tokenizer), grammar, log_level=0)
    if matcher.is_error():
        raise _unusable(matcher.get_error().partition("\n<state>")[0])
    return matcher


def _unusable(reason: str) -> PromptError:
    return PromptError(
        "the grammar cannot be used",
        expected="a JSON schema, a regular expression, or a grammar that llguidance supports",
        got=reason.strip()[:200],
    )
