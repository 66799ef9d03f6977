"""Matplotlib figures as SVG with the colors and the font of the surrounding page."""

import re
from collections.abc import Callable
from io import StringIO

from markupsafe import Markup, escape
from matplotlib import style
from matplotlib.figure import Figure

from inference.benchmark.report.style import any_character, printable

# Placeholders for the color variables of the page, so that figures are legible on light and dark
# pages.
INK, MUTED, LINE, PAPER = "#010101", "#020202", "#030303", "#040404"
_VARIABLES = {INK: "var(--ink)", MUTED: "var(--muted)", LINE: "var(--line)", PAPER: "var(--paper)"}

SMALL = 10.5  # font size of text next to the data, in pixels

_THEME = {
    "svg.fonttype": "none",  # text is not converted to outlines
    "text.parse_math": False,  # dollars in a name do not start a formula
    "font.size": 11.5,
    "text.color": INK,
    "hatch.color": PAPER,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.labelsize": SMALL,
    "axes.titlesize": 11.5,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "xtick.color": LINE,
    "xtick.labelcolor": MUTED,
    "xtick.labelsize": SMALL,
    "ytick.color": LINE,
    "ytick.labelcolor": MUTED,
    "ytick.labelsize": SMALL,
    "legend.frameon": False,
    "legend.fontsize": SMALL,
}
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))

_TAG = re.compile(r"<[^>]*>")
_DEFAULT_STYLE = re.compile(r"<defs>\s*<style.*?</style>\s*</defs>", re.DOTALL)
_SIZE = re.compile(r' (width|height)="([\d.]+)pt"')
_NAMESPACE = re.compile(r' xmlns(:xlink)?="[^"]*"')
_REFERENCE = re.compile(r'(\bid="|href="#|url\(#)')
_FONT = re.compile(r"font-family: [^;\"]*;? ?")


def picture(
    name: str, size: tuple[int, int], paint: Callable[[Figure], None], *, alt: str
) -> Markup:
    """Return an `<svg>` element with the drawing of `paint`.

    Args:
        name: name of the figure, unique on the page.
        size: width and height in pixels.
        paint: function that draws on an empty figure.
        alt: alternative text of the figure.
    """
    width, height = size
    target = StringIO()
    with style.context({**_THEME, "svg.hashsalt": name}, after_reset=True), any_character():
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        paint(figure)
        figure.savefig(target, format="svg", transparent=True, metadata=_NO_METADATA)
    return Markup(_for_page(target.getvalue(), name, alt))


def _for_page(drawing: str, name: str, alt: str) -> str:
    """Return the `<svg>` element, with the page's colors and with ids that are unique there."""
    element = _DEFAULT_STYLE.sub("", drawing[drawing.index("<svg") :])
    element = _TAG.sub(lambda tag: _themed(tag[0], name), element)
    label = escape(printable(alt))
    return element.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def _themed(tag: str, name: str) -> str:
    tag = _NAMESPACE.sub("", _SIZE.sub(r' \1="\2"', tag))
    tag = _FONT.sub("", _REFERENCE.sub(rf"\g<1>{name}-", tag))
    for color, variable in _VARIABLES.items():
        tag = tag.replace(color, variable)
    return tag
