"""Colours of the report, told apart by colour-blind readers and on light and dark pages alike.

Okabe and Ito's colours stand for methods, Paul Tol's light ones for experts, and one hue from light
to dark for the phases of decoding: no colour means two things.
"""

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from markupsafe import Markup, escape

from inference.benchmark.document import ComparisonDocument

ELLIPSIS = "…"
NO_NUMBER = "—"

_SEPARATOR = re.compile(r"(?<=[/,=_])")
_SIGNS = {" ": "·", "\n": "↵", "\t": "⇥"}


def printable(text: str, keep: str = "") -> str:
    """Return text whose control characters, and others that nobody sees, are escapes."""
    return "".join(one if one.isprintable() or one in keep else _escaped(one) for one in text)


def verbatim(text: str) -> Markup:
    """Return text for an element that shows its line breaks."""
    return escape(printable(text, keep="\n"))


def visible(token: str) -> str:
    """Return a token in which white space can be seen, too: space `·`, newline `↵`, tab `⇥`."""
    return printable("".join(_SIGNS.get(one, one) for one in token))


def shortened(text: str, limit: int) -> str:
    """Return text of at most so many characters; where it is longer, its middle is left out."""
    if len(text) <= limit:
        return text
    tail = (limit - 1) // 2
    return text[: limit - 1 - tail] + ELLIPSIS + text[len(text) - tail :]


def short_names(names: Sequence[str], limit: int) -> dict[str, str]:
    """Return names of at most so many characters, or few more, by name; they remain different.

    A long name loses its middle, or what all long names begin with if that tells them apart.
    """
    middle = {name: shortened(printable(name), limit) for name in names}
    begin = _shared_length([name for name in names if len(name) > limit])
    end = {
        name: ELLIPSIS + shortened(printable(name[begin:]), limit) if len(name) > limit else short
        for name, short in middle.items()
    }
    numbered = {name: f"{short} ({place})" for place, (name, short) in enumerate(middle.items(), 1)}
    return next((one for one in (middle, end) if len(set(one.values())) == len(one)), numbered)


def breakable(name: str) -> Markup:
    """Return a name that may go on in the next line after its separators."""
    parts = _SEPARATOR.split(printable(name))
    return Markup("<wbr>").join(map(escape, parts))


def cells(text: str) -> int:
    """Return how many columns text takes in a font of fixed width."""
    return sum(2 if unicodedata.east_asian_width(one) in "WF" else 1 for one in text)


def fixed(value: float, decimals: int = 2) -> str:
    """Return a number with so many decimals."""
    return f"{value:,.{decimals}f}" if math.isfinite(value) else NO_NUMBER


def significant(value: float) -> str:
    """Return a number with three significant digits, or all those before the point."""
    if not math.isfinite(value) or not value:
        return fixed(value, 0)
    return fixed(value, min(4, max(0, 2 - math.floor(math.log10(abs(value))))))


def milliseconds(seconds: float) -> str:
    """Return seconds as a number of milliseconds."""
    return significant(1000 * seconds)


def percent(share: float | None) -> str:
    """Return a share in percent; only all is 100%."""
    if share is None or not math.isfinite(share):
        return NO_NUMBER
    text = f"{100 * share:.1f}" if share < 0.1 else f"{100 * share:.0f}"
    return ">99%" if text == "100" and share < 1 else f"{text}%"


def size(count: int | None) -> str:
    """Return a number of bytes in the unit that suits it."""
    if count is None:
        return NO_NUMBER
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << power:
            return f"{significant(count / (1 << power))} {unit}"
    return f"{count} B"


def interval(low: float, high: float) -> str:
    """Return an interval in brackets."""
    return f"[{fixed(low)}, {fixed(high)}]"


def enumeration(words: Sequence[Markup]) -> Markup:
    """Return words with commas between them, and `and` before the last one."""
    *others, last = words
    return Markup(" and ").join([Markup(", ").join(others), last]) if others else last


def _shared_length(names: Sequence[str]) -> int:
    """Return the length of the parts that all names begin with."""
    places = zip(*(_SEPARATOR.split(name) for name in names), strict=False)
    return sum(len(parts[0]) for parts in takewhile(lambda parts: len({*parts}) == 1, places))


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


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
    number, color = divmod(place, len(_METHODS))
    number %= len(_MARKERS)
    return Look(label, _METHODS[color], _MARKERS[number], _DASHES[number], _HATCHES[number])


def expert_color(expert: int) -> str:
    """Return the colour of an expert; dark text can be read on it."""
    return _EXPERTS[expert % len(_EXPERTS)]


def text_on(color: str) -> str:
    """Return black or white, whichever can be read on a colour."""
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return "#111111" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"


INK, LINE = "#1f2937", "#d1d5db"

THEME = {
    "font.size": 9.5,
    "text.color": INK,
    "text.parse_math": False,  # a name with dollars is no formula
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
