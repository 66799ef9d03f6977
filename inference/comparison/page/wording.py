"""Text and numbers as the report shows them: nothing invisible, no needless digits."""

import math
import re
import unicodedata
from collections.abc import Sequence
from itertools import takewhile

from markupsafe import Markup, escape

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
