"""Text whose colors show where each token came from: the target itself, or a draft and its depth.

Terminals and HTML pages use similar colors. Tokens from the target itself have no color.
"""

from collections.abc import Iterable, Iterator
from html import escape
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


class _Color(NamedTuple):
    terminal: str  # style in the syntax of the library `rich`
    html: str  # background color, legible in light and in dark notebooks


_COLORS = (
    _Color("", "transparent"),
    _Color("green", "#009e7355"),
    _Color("cyan", "#56b4e955"),
    _Color("magenta", "#cc79a755"),
    _Color("yellow", "#e69f0055"),
    _Color("blue", "#0072b255"),
)
DEEPEST_COLOR = len(_COLORS) - 1  # deeper drafts have the same color


def pieces_by_depth(
    tokens: Iterable[tuple[int, int]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[TextPiece]:
    """Yield the text of tokens in pieces of whole characters, each with its depth.

    Args:
        tokens: id and depth of each token.
        tokenizer: the target's tokenizer.
    """
    growing, depth = IncrementalText(tokenizer), 0
    for token, depth in tokens:
        if text := growing.push(token):
            yield TextPiece(text, depth)
    if rest := growing.flush():
        yield TextPiece(rest, depth)


def terminal_style(depth: int) -> str:
    """Return the style for tokens of a depth, in the syntax of the library `rich`."""
    return _color(depth).terminal


def terminal_legend(depths: Iterable[int]) -> Text:
    """Return a line that explains the colors of tokens in a terminal.

    Args:
        depths: depths that occur; 0, for tokens from the target itself, is always explained.
    """
    legend = Text("tokens from: the target itself")
    for index, depth in enumerate(_distinct(depths)):
        legend.append(", " if index else "; drafts at depth ")
        legend.append(_label(depth), style=terminal_style(depth))
    return legend


def colored_html(pieces: Iterable[TextPiece], caption: str) -> str:
    """Return HTML of a text, followed by a legend and a caption.

    Args:
        pieces: pieces of the text.
        caption: plain text below the text.
    """
    several = list(pieces)
    text = "".join(_span(piece.text, piece.depth) for piece in several)
    labels = [_span(_label(depth), depth) for depth in _distinct(p.depth for p in several)]
    legend = "tokens from: the target itself"
    if labels:
        legend += f"; drafts at depth {', '.join(labels)}"
    return (
        f'<div style="white-space: pre-wrap">{text}</div>'
        f'<div style="opacity: 0.7; font-size: 85%">{legend}<br>{escape(caption)}</div>'
    )


def _span(text: str, depth: int) -> str:
    if depth == 0:
        return escape(text)
    style = f"background: {_color(depth).html}"
    return f'<span style="{style}" title="draft at depth {depth}">{escape(text)}</span>'


def _color(depth: int) -> _Color:
    return _COLORS[min(depth, DEEPEST_COLOR)]


def _distinct(depths: Iterable[int]) -> list[int]:
    """Return the depths of drafts that have different colors, in ascending order."""
    return sorted({min(depth, DEEPEST_COLOR) for depth in depths} - {0})


def _label(depth: int) -> str:
    return f"{depth} or deeper" if depth == DEEPEST_COLOR else str(depth)
