"""A figure that is embedded in a page has the page's colors and its own ids."""

import re
from xml.etree import ElementTree

from markupsafe import Markup
from matplotlib.figure import Figure

from inference.benchmark.report.canvas import INK, LINE, MUTED, PAPER, picture


def paint(figure: Figure) -> None:
    axes = figure.add_axes((0.2, 0.2, 0.7, 0.7), xlabel="depth")
    axes.plot([0, 1], [0, 1], "o-", color=INK, markeredgecolor=PAPER)
    axes.text(0.5, 0.5, f"{INK} <b> $x$")


def svg_of(name: str = "speed", alt: str = "A line") -> Markup:
    return picture(name, (120, 80), paint, alt=alt)


def test_colors_are_those_of_the_page_but_text_is_shown_as_it_is() -> None:
    drawing = svg_of()
    tags = "".join(re.findall(r"<[^>]*>", drawing))
    assert not re.search("|".join((INK, MUTED, LINE, PAPER)), tags)
    assert all(f"var(--{name})" in tags for name in ("ink", "muted", "line", "paper"))
    assert f"{INK} &lt;b&gt; $x$</text>" in drawing


def test_every_id_and_every_reference_begins_with_the_name_of_the_figure() -> None:
    drawing = svg_of("time-0")
    ids = re.findall(r'\bid="([^"]*)"', drawing)
    used = re.findall(r'(?:url\(|href=")#([^")]*)', drawing)
    assert used
    assert set(used) <= set(ids)
    assert all(each.startswith("time-0-") for each in ids)


def test_the_element_has_its_size_in_pixels_and_a_text_alternative() -> None:
    element = ElementTree.fromstring(svg_of(alt='"a" < b\x1b').replace("xlink:", ""))
    assert (element.tag, element.get("role")) == ("svg", "img")
    assert [float(element.get(side, "")) for side in ("width", "height")] == [120, 80]
    assert element.get("aria-label") == r'"a" < b\x1b'


def test_the_font_is_left_to_the_page_and_no_date_is_stored() -> None:
    drawing = svg_of()
    assert "font-family" not in drawing
    assert not re.search(r"<style|<metadata[^/]*dc:date|xmlns", drawing)
    assert drawing == svg_of()
