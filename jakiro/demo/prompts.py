"""Prompts of the demo and of measurements: source code up to a function or class header."""

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
        text: source code up to the colon that ends the header of a function or class.
        path: path of the source file.
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
    """Return distinct prompts from as many files as possible, the same prompts on every call.

    Before its header, each prompt contains as many whole lines as `max_tokens` allows. A header is
    left out if it is longer than `max_tokens`, or if it is so close to the start of its file that
    the prompt would be shorter than `min_tokens`.

    Args:
        corpus: source files.
        split: split that the files belong to.
        tokenizer: the target's tokenizer, used to count tokens.
        count: number of prompts.
        min_tokens: smallest number of tokens per prompt.
        max_tokens: largest number of tokens per prompt.

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
            remedy="request fewer prompts, or widen the limits on their length in tokens",
        )
    return prompts


def prompts_from_file(
    file: SourceFile, tokenizer: PreTrainedTokenizerBase, *, count: int, max_tokens: int = 96
) -> tuple[Prompt, ...]:
    """Return up to `count` distinct prompts from a file, or none if the file is not valid Python.

    Args:
        file: source file.
        tokenizer: the target's tokenizer, used to count tokens.
        count: largest number of prompts.
        max_tokens: largest number of tokens per prompt.
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
    """Yield a prompt for each header, or None for a header without a prompt of a valid length."""

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
    """Return a mapping from the index of each header's first line to the index after its last line.

    Headers with the body on the same line are left out.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError:  # some library files are data for other tools, not valid Python
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
