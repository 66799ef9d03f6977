"""Colors, wording and number formats of the report.

Color-blind readers can distinguish the colors on both light and dark pages. Methods have the
colors of Okabe and Ito, experts have Paul Tol's light colors, and the phases of decoding have
shades of a single hue. No color has two meanings.
"""

import math
import re
import unicodedata
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile

from markupsafe import Markup, escape

from inference.benchmark.document import ComparisonDocument

ELLIPSIS = "…"
NO_NUMBER = "—"

_SEPARATOR = re.compile(r"(?<=[/,=_])")
_SIGNS = {" ": "·", "\n": "↵", "\t": "⇥"}


def printable(text: str, keep: str = "") -> str:
    """Return text with control characters and other invisible characters escaped.

    Args:
        text: any text.
        keep: characters that are not escaped.
    """
    return "".join(char if char.isprintable() or char in keep else _escaped(char) for char in text)


def anchor(title: str) -> str:
    """Return the id of the section with a title, as used in links."""
    return title.lower().replace(" ", "-")


def verbatim(text: str) -> Markup:
    """Return escaped text for an element that shows line breaks."""
    return escape(printable(text, keep="\n"))


def visible(token: str) -> str:
    """Return a token with visible white space: space `·`, newline `↵`, tab `⇥`."""
    return printable("".join(_SIGNS.get(char, char) for char in token))


def shortened(text: str, limit: int) -> str:
    """Return text, with its middle replaced by an ellipsis if the text is too long.

    Args:
        text: any text.
        limit: largest number of characters.
    """
    if len(text) <= limit:
        return text
    tail = (limit - 1) // 2
    return text[: limit - 1 - tail] + ELLIPSIS + text[len(text) - tail :]


def short_names(names: Sequence[str], limit: int) -> dict[str, str]:
    """Return a short and unique name for each name.

    The middle of a long name is left out. If short names are then no longer unique, the beginning
    that all long names share is left out instead; if this does not help either, the short names
    are numbered.

    Args:
        names: unique names.
        limit: largest number of characters, which numbered names may exceed a little.
    """
    middle = {name: shortened(printable(name), limit) for name in names}
    begin = _shared_length([name for name in names if len(name) > limit])
    end = {
        name: ELLIPSIS + shortened(printable(name[begin:]), limit) if len(name) > limit else short
        for name, short in middle.items()
    }
    numbered = {
        name: f"{short} ({number})" for number, (name, short) in enumerate(middle.items(), 1)
    }
    different = (names for names in (middle, end) if len(set(names.values())) == len(names))
    return next(different, numbered)


def breakable(name: str) -> Markup:
    """Return a name in which a line may break after each separator."""
    parts = _SEPARATOR.split(printable(name))
    return Markup("<wbr>").join(map(escape, parts))


def cells(text: str) -> int:
    """Return the number of columns that text occupies in a fixed-width font."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def fixed(value: float, decimals: int = 2) -> str:
    """Return a number with a fixed number of decimals; a dash if it is not finite.

    Args:
        value: number to format.
        decimals: digits after the point.
    """
    return f"{value:,.{decimals}f}" if math.isfinite(value) else NO_NUMBER


def significant(value: float) -> str:
    """Return a number with three significant digits and at most four decimals.

    All digits before the point are kept, even if there are more than three.
    """
    if not math.isfinite(value) or not value:
        return fixed(value, 0)
    return fixed(value, min(4, max(0, 2 - math.floor(math.log10(abs(value))))))


def milliseconds(seconds: float) -> str:
    """Return seconds as a number of milliseconds."""
    return significant(1000 * seconds)


def percent(share: float | None) -> str:
    """Return a share in percent; only a share of exactly 1 becomes 100%."""
    if share is None or not math.isfinite(share):
        return NO_NUMBER
    text = f"{100 * share:.1f}" if share < 0.1 else f"{100 * share:.0f}"
    return ">99%" if text == "100" and share < 1 else f"{text}%"


def size(count: int | None) -> str:
    """Return a number of bytes in a suitable unit."""
    if count is None:
        return NO_NUMBER
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << power:
            return f"{significant(count / (1 << power))} {unit}"
    return f"{count} B"


def interval(low: float, high: float) -> str:
    """Return an interval in brackets.

    Args:
        low: lower end.
        high: upper end.
    """
    return f"[{fixed(low)}, {fixed(high)}]"


def enumeration(words: Sequence[Markup]) -> Markup:
    """Return words joined by commas, with `and` before the last."""
    *others, last = words
    return Markup(" and ").join([Markup(", ").join(others), last]) if others else last


def _shared_length(names: Sequence[str]) -> int:
    """Return the length of the beginning that all names share, up to a separator."""
    columns = zip(*(_SEPARATOR.split(name) for name in names), strict=False)
    return sum(len(parts[0]) for parts in takewhile(lambda parts: len({*parts}) == 1, columns))


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


_LABEL_LIMIT = 46  # characters

_METHODS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
_NOT_DRAFTING = "#8a8f98"
# Markers, dashes and hatches distinguish methods that have the same color.
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
    """Label, color, marker, dash and hatch of a method, the same in the whole report."""

    label: str
    color: str
    marker: str = "o"
    dash: str = "-"
    hatch: str = ""


Looks = Mapping[str, Look]


def looks(document: ComparisonDocument) -> Looks:
    """Return the name and the look of every method; methods that do not draft are gray."""
    names = list(dict.fromkeys(method.name for method in document.methods))
    labels = short_names(names, _LABEL_LIMIT)
    colored = dict.fromkeys(
        method.name for method in document.methods if method.conditional_acceptance_rate
    )
    return {name: Look(labels[name], _NOT_DRAFTING) for name in names} | {
        name: look(labels[name], index) for index, name in enumerate(colored)
    }


def look(label: str, index: int) -> Look:
    """Return the look of one of several methods or curves.

    Args:
        label: text of the legend.
        index: index of the method or curve, from 0, which determines its color and marker.
    """
    number, color = divmod(index, len(_METHODS))
    number %= len(_MARKERS)
    return Look(label, _METHODS[color], _MARKERS[number], _DASHES[number], _HATCHES[number])


def expert_color(expert: int) -> str:
    """Return the color of an expert, on which dark text is legible."""
    return _EXPERTS[expert % len(_EXPERTS)]


def text_on(color: str) -> str:
    """Return black or white, whichever is legible on a color."""
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return "#111111" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"


INK, LINE = "#1f2937", "#d1d5db"
CURVE = _METHODS[0]
OUTCOMES = {"better": "#009e73", "worse": "#d55e00", "not resolved": "#6b7280"}
POINTS = "#111827"  # single measurements, shown with their mean

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
