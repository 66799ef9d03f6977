"""The page shows every method, escapes the names in it, and needs no other file."""

import re

from helpers.comparisons import make_document, with_figures

from inference.benchmark.report.page import render


def test_a_page_shows_every_method_and_needs_nothing_else() -> None:
    names = ("transformers", "autoregressive", "drafter=mine", "<script>alert(1)</script> $x$ 漢")
    document = make_document(names, (0.0, 0.8), ("chat", "code"), prompts=6)
    document = with_figures(document, 2, notes=("<b>a note</b>",))
    page = render(document)
    one = document.figures("drafter=mine", 0.8)
    assert f"<td>{one.speedup:.2f} [{one.speedup_low:.2f}, {one.speedup_high:.2f}]</td>" in page
    assert page.count("&lt;script&gt;") > 2
    assert "<script" not in page
    assert "<b>" not in page
    assert not re.search(r'(src|href)="(?!#)', page)
    assert render(document) == page
