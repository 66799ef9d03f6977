"""Colours of the report, told apart by colour-blind readers and on light and dark pages alike.

Okabe and Ito's colours stand for methods, Paul Tol's light ones for experts, and one hue from light
to dark for the phases of decoding: no colour means two things.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from inference.comparison.document import ComparisonDocument
from inference.comparison.page.wording import short_names

_LABEL_LIMIT = 46  # characters

_METHODS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
_NOT_DRAFTING = "#8a8f98"
# What a second and third turn through the colours is told apart by.
_MARKERS, _DASHES, _HATCHES = ("o", "s", "^"), ("-", "--", ":"), ("", "////", "....")

_EXPERTS = (
    *("#77aadd", "#ee8866", "#eedd88", "#ffaabb"),
    *("#44bb99", "#bbcc33", "#99ddff", "#c4b5a5"),
)

PHASES = {
    "prefill": "#ddd3ee",
    "draft": "#b39ddb",
    "verify": "#7e57c2",
    "commit": "#4a2f8a",
    "other": "#9aa0a8",
}


@dataclass(frozen=True)
class Look:
    """How a method is written and drawn, everywhere."""

    label: str
    color: str
    marker: str = "o"
    dash: str = "-"
    hatch: str = ""


Looks = Mapping[str, Look]


def looks(document: ComparisonDocument) -> Looks:
    """Return the look of every method by its name; methods that do not draft are grey."""
    names = list(dict.fromkeys(one.name for one in document.methods))
    labels = short_names(names, _LABEL_LIMIT)
    colored = dict.fromkeys(one.name for one in document.methods if one.acceptance_by_depth)
    return {name: Look(labels[name], _NOT_DRAFTING) for name in names} | {
        name: look(labels[name], place) for place, name in enumerate(colored)
    }


def look(label: str, place: int) -> Look:
    """Return the look of one of several things, told apart by its place among them."""
    turn, color = divmod(place, len(_METHODS))
    turn %= len(_MARKERS)
    return Look(label, _METHODS[color], _MARKERS[turn], _DASHES[turn], _HATCHES[turn])


def expert_color(expert: int) -> str:
    """Return the colour of an expert; dark text can be read on it."""
    return _EXPERTS[expert % len(_EXPERTS)]


def text_on(color: str) -> str:
    """Return black or white, whichever can be read on a colour."""
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return "#111111" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"
