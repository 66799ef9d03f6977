"""Held-out prompts of the demo: heads of functions and classes from files not trained on."""

import ast
import hashlib
from collections.abc import Iterable, Iterator
from itertools import chain, takewhile, zip_longest
from typing import Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from jakiro.demo.corpus import Corpus, SourceFile
from jakiro.errors import DataError


class Prompt(NamedTuple):
    """A prompt to complete.

    Attributes:
        text: source code up to the colon of the head of a function or class.
        path: file that the source is from.
    """

    text: str
    path: str


def prompts_from_split(
    corpus: Corpus,
    split: Literal["dev", "test"],
    tokenizer: PreTrainedTokenizerBase,
    *,
    count: int,
    min_tokens: int = 32,
    max_tokens: int = 96,
) -> tuple[Prompt, ...]:
    """Return different prompts from as many files as possible, the same prompts each time.

    Each prompt has as many whole lines before its head as `max_tokens` allows. A head that is too
    long by itself is left out, as is a prompt at the top of a file that is too short.

    Args:
        corpus: source files.
        split: split that the files belong to.
        tokenizer: the target's tokenizer, to count tokens.
        count: number of prompts.
        min_tokens: least number of tokens per prompt.
        max_tokens: greatest number of tokens per prompt.

    Raises:
        DataError: the split has fewer than `count` prompts.
    """
    files = sorted(corpus.files(split), key=lambda file: _shuffle_key(file.path))
    candidates = (_shuffled_prompts(file, tokenizer, min_tokens, max_tokens) for file in files)
    prompts = _different(chain.from_iterable(zip_longest(*candidates)), count)
    if len(prompts) < count:
        raise DataError(
            f"too few prompts in the {split} files",
            expected=count,
            got=len(prompts),
            remedy="ask for fewer prompts, or widen the limits on their tokens",
        )
    return prompts


def prompts_from_file(
    file: SourceFile, tokenizer: PreTrainedTokenizerBase, *, count: int, max_tokens: int = 96
) -> tuple[Prompt, ...]:
    """Return up to `count` different prompts of one file; a file that is not Python has none.

    Args:
        file: source file.
        tokenizer: the target's tokenizer, to count tokens.
        count: greatest number of prompts.
        max_tokens: greatest number of tokens per prompt.
    """
    return _different(_shuffled_prompts(file, tokenizer, 32, max_tokens), count)


def _different(prompts: Iterable[Prompt | None], count: int) -> tuple[Prompt, ...]:
    by_text: dict[str, Prompt] = {}
    for prompt in prompts:
        if len(by_text) == count:
            break
        if prompt is not None:
            by_text.setdefault(prompt.text, prompt)
    return tuple(by_text.values())


def _shuffled_prompts(
    file: SourceFile, tokenizer: PreTrainedTokenizerBase, min_tokens: int, max_tokens: int
) -> Iterator[Prompt | None]:
    """Yield a prompt for every head, or None if the head has no prompt between the limits."""

    def num_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    lines = file.text.split("\n")
    heads = _heads(file.text, lines)
    for begin in sorted(heads, key=lambda begin: _shuffle_key(f"{file.path}:{begin}")):
        texts = ("\n".join(lines[first : heads[begin]]) for first in range(begin, -1, -1))
        fitting = list(takewhile(lambda text: num_tokens(text) <= max_tokens, texts))
        text = fitting[-1].lstrip("\n") if fitting else ""
        yield Prompt(text, file.path) if num_tokens(text) >= min_tokens else None


def _heads(text: str, lines: list[str]) -> dict[int, int]:
    """Return the line index of each head's first line, mapped to the line index after its last.

    Heads whose body is on the same line are left out.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError:  # some files of the library are data for other tools
        return {}
    heads = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            ends = range(node.body[0].lineno - 1, node.lineno - 1, -1)
            if end := next((end for end in ends if lines[end - 1].endswith(":")), None):
                heads[node.lineno - 1] = end
    return heads


def _shuffle_key(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()
