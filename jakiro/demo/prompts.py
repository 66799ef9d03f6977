"""Prompts that the demo's models never saw: heads of functions and classes of held-out files."""

import ast
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from transformers import PreTrainedTokenizerBase

from jakiro.demo.corpus import Corpus, SourceFile
from jakiro.errors import DataError


@dataclass(frozen=True)
class Prompt:
    """Source up to the colon of a head, whose body is to be written, and the file it is from."""

    text: str
    path: str


@dataclass(frozen=True)
class _Head:
    """A definition's place: the file's lines, and where its head begins and ends among them."""

    path: str
    lines: Sequence[str]
    begin: int
    end: int


def held_out_prompts(
    corpus: Corpus,
    split: Literal["dev", "test"],
    tokenizer: PreTrainedTokenizerBase,
    *,
    count: int,
    min_tokens: int = 32,
    max_tokens: int = 96,
) -> tuple[Prompt, ...]:
    """Choose prompts, all different and from as many files as possible; the same ones each time.

    Each holds as many whole lines before its head as its budget allows. `dev` and `test` share no
    file, and neither shares one with the training text.

    Args:
        corpus: holds the files.
        split: `dev` to choose settings on, `test` to report on.
        tokenizer: counts the tokens.
        count: number of prompts.
        min_tokens: a shorter prompt, at the top of a file, is passed over.
        max_tokens: the budget; a longer head is passed over.

    Raises:
        DataError: the split holds fewer prompts than asked for.
    """
    chosen = _different(
        _heads_in_turn(corpus.files(split)), tokenizer, count, min_tokens, max_tokens
    )
    if len(chosen) < count:
        raise DataError(
            f"too few prompts in the {split} files",
            expected=count,
            got=len(chosen),
            remedy="ask for fewer prompts, or widen the limits on their tokens",
        )
    return chosen


def prompts_of(
    file: SourceFile,
    tokenizer: PreTrainedTokenizerBase,
    *,
    count: int,
    min_tokens: int = 32,
    max_tokens: int = 96,
) -> tuple[Prompt, ...]:
    """Choose up to `count` prompts of one file, all different; the same ones each time.

    Args:
        file: source of any kind; one that is no Python has none.
        tokenizer: counts the tokens.
        count: number of prompts.
        min_tokens: a shorter prompt, at the top of a file, is passed over.
        max_tokens: the budget; a longer head is passed over.
    """
    return _different(iter(_shuffled_heads(file)), tokenizer, count, min_tokens, max_tokens)


def _different(
    heads: Iterator[_Head],
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    min_tokens: int,
    max_tokens: int,
) -> tuple[Prompt, ...]:
    by_text: dict[str, Prompt] = {}
    for head in heads:
        if len(by_text) == count:
            break
        text = _longest_text(head, tokenizer, max_tokens)
        if text is not None and _num_tokens(tokenizer, text) >= min_tokens:
            by_text.setdefault(text, Prompt(text, head.path))
    return tuple(by_text.values())


def _heads_in_turn(files: Sequence[SourceFile]) -> Iterator[_Head]:
    """Yield one head of each file, then a second one of each, and so on, in a fixed shuffle."""
    shuffled = sorted(files, key=lambda file: _shuffle_key(file.path))
    for one_of_each in zip_longest(*map(_shuffled_heads, shuffled)):
        yield from (head for head in one_of_each if head is not None)


def _shuffled_heads(file: SourceFile) -> list[_Head]:
    try:
        tree = ast.parse(file.text)
    except SyntaxError:  # kept in the library as data for other tools
        return []
    lines = file.text.split("\n")
    heads = [
        _Head(file.path, lines, node.lineno - 1, end)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and (end := _end_of_head(lines, node)) is not None
    ]
    return sorted(heads, key=lambda head: _shuffle_key(f"{head.path}:{head.begin}"))


def _end_of_head(
    lines: Sequence[str], node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
) -> int | None:
    """Return the index after the line with the head's colon; None if the body shares that line."""
    for end in range(node.body[0].lineno - 1, node.lineno - 1, -1):
        if lines[end - 1].endswith(":"):
            return end
    return None


def _longest_text(head: _Head, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> str | None:
    """Return the head with the most lines before it that the budget allows; None without any."""
    best = None
    for begin in range(head.begin, -1, -1):
        text = "\n".join(head.lines[begin : head.end])
        if _num_tokens(tokenizer, text) > max_tokens:
            break
        best = text
    return None if best is None else best.lstrip("\n")


def _num_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))


def _shuffle_key(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()
