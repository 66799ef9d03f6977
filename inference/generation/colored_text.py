"""Text whose colors show where each token came from: the target itself, or a draft and its depth.

Tokens from the target itself have no color.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from inference.generation.incremental_text import IncrementalText


class TextPiece(NamedTuple):
    """Text of one or several tokens, with the depth of the last one in its draft tree.

    The depth is 0 if the token came from the target itself.
    """

    text: str
    depth: int


_STYLES = ("", "green", "cyan", "magenta", "yellow", "blue")
DEEPEST_COLOR = len(_STYLES) - 1  # deeper drafts have the same color


def pieces_by_depth(
    tokens: Iterable[tuple[int, int]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[TextPiece]:
    """Yield the text of tokens in pieces of whole characters, each with its depth."""
    growing, depth = IncrementalText(tokenizer), 0
    for token, depth in tokens:
        if text := growing.push(token):
            yield TextPiece(text, depth)
    if rest := growing.flush():
        yield TextPiece(rest, depth)


def terminal_style(depth: int) -> str:
    """Return the style for tokens of a depth, in the syntax of the library `rich`."""
    return _STYLES[min(depth, DEEPEST_COLOR)]


def terminal_legend(depths: Iterable[int]) -> Text:
    """Return a line that explains the colors of tokens in a terminal."""
    legend = Text("tokens from: the target itself")
    for index, depth in enumerate(_distinct(depths)):
        legend.append(", " if index else "; drafts at depth ")
        legend.append(_label(depth), style=terminal_style(depth))
    return legend


def _distinct(depths: Iterable[int]) -> list[int]:
    """Return the depths of drafts that have different colors, in ascending order."""
    return sorted({min(depth, DEEPEST_COLOR) for depth in depths} - {0})


def _label(depth: int) -> str:
    return f"{depth} or deeper" if depth == DEEPEST_COLOR else str(depth)
