"""Prompts that the demo's models never saw: heads of functions and classes of held-out files."""

import ast
import hashlib
from collections.abc import Iterable, Iterator
from itertools import chain, takewhile, zip_longest
from typing import Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from jakiro.demo.corpus import Corpus, SourceFile
from jakiro.errors import DataError


class Prompt(NamedTuple):
    """Source up to the colon of a head, whose body is to be written, and the file it is from."""

    text: str
    path: str


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

    Each holds as many whole lines before its head as `max_tokens` allows; a longer head is passed
    over, and so is a prompt at the top of a file that is shorter than `min_tokens`.

    Raises:
        DataError: the split holds fewer prompts than asked for.
    """
    files = sorted(corpus.files(split), key=lambda file: _shuffle_key(file.path))
    prompts = (_shuffled_prompts(file, tokenizer, min_tokens, max_tokens) for file in files)
    chosen = _different(chain.from_iterable(zip_longest(*prompts)), count)
    if len(chosen) < count:
        raise DataError(
            f"too few prompts in the {split} files",
            expected=count,
            got=len(chosen),
            remedy="ask for fewer prompts, or widen the limits on their tokens",
        )
    return chosen


def prompts_of(
    file: SourceFile, tokenizer: PreTrainedTokenizerBase, *, count: int, max_tokens: int = 96
) -> tuple[Prompt, ...]:
    """Choose up to `count` prompts of one file in the same way; a file without Python has none."""
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
    """Yield a prompt for every head; None for a head that has no prompt between the limits."""

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
    """Return where heads begin and end, as indices of lines; not those of bodies on one line."""
    try:
        tree = ast.parse(text)
    except SyntaxError:  # kept in the library as data for other tools
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
