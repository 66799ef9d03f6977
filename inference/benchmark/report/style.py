"""Colors of the plots of a report, and names in them.

Color-blind readers can distinguish the colors: methods have those of Okabe and Ito.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

ELLIPSIS = "…"
INK, LINE = "#1f2937", "#d1d5db"
_METHODS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
_MARKERS, _DASHES = ("o", "s", "^"), ("-", "--", ":")  # of methods that have the same color


@dataclass(frozen=True)
class Look:
    """Label, color, marker and dash of a method or curve."""

    label: str
    color: str
    marker: str = "o"
    dash: str = "-"


def looks_of(labels: Mapping[str, str]) -> dict[str, Look]:
    """Return a look for each name, given its label."""
    return {name: look(label, index) for index, (name, label) in enumerate(labels.items())}


def look(label: str, index: int) -> Look:
    """Return the look of one of several methods or curves, by its index from 0."""
    number, color = divmod(index, len(_METHODS))
    number %= len(_MARKERS)
    return Look(label, _METHODS[color], _MARKERS[number], _DASHES[number])


def short_names(names: Sequence[str], limit: int) -> dict[str, str]:
    """Return unique names, without the middle of long ones; if necessary, these are numbered."""
    short = {name: _shortened(name, limit) for name in names}
    if len(set(short.values())) == len(names):
        return short
    return {name: f"{text} ({number})" for number, (name, text) in enumerate(short.items(), 1)}


def _shortened(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    tail = (limit - 1) // 2
    return text[: limit - 1 - tail] + ELLIPSIS + text[len(text) - tail :]


_LACKING = r"Glyph .* missing from|Matplotlib currently does not support .* natively"

THEME = {
    "font.size": 9.5,
    "text.color": INK,
    "text.parse_math": False,  # dollar signs in a name do not start a formula
    "axes.edgecolor": LINE,
    "axes.labelcolor": INK,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "grid.color": "#eceff3",
    "xtick.color": LINE,
    "xtick.labelcolor": INK,
    "ytick.left": False,
    "ytick.labelcolor": INK,
}


@contextmanager
def any_character() -> Iterator[None]:
    """Suppress warnings about characters that matplotlib's font lacks but browsers can show."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_LACKING, category=UserWarning)
        yield
