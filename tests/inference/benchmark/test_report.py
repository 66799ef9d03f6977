"""Tables have intervals only where there are enough prompts; the page needs no other file."""

import re
from io import StringIO

from helpers.comparisons import make_document, with_figures
from rich.console import Console

from inference.benchmark.document import ComparisonDocument
from inference.benchmark.report import page_of, show


def printed(document: ComparisonDocument) -> str:
    stream = StringIO()
    show(document, Console(file=stream, width=120))
    return stream.getvalue()


def test_intervals_of_enough_prompts_are_shown() -> None:
    document = make_document(prompts=5)
    mine = document.figures("drafter=mine", 0.0)
    shown = printed(document)
    assert f"{mine.speedup:.2f} [{mine.speedup_low:.2f}, {mine.speedup_high:.2f}]" in shown
    assert "Intervals need" not in shown


def test_intervals_of_too_few_prompts_are_left_out_and_one_sentence_says_why() -> None:
    document = make_document(temperatures=(0.0, 1.0), prompts=4)
    shown = printed(document)
    assert f"{document.figures('drafter=mine', 0.0).speedup:.2f} " in shown
    assert "[" not in shown.replace("speed-up [95%]", "")
    assert shown.count("Intervals need at least 5 prompts.") == 1


def test_differences_by_rounding_are_explained_where_there_are_any() -> None:
    same = make_document()
    assert "rounded differently" not in printed(same)
    for share in (0.5, 0.0):
        other = with_figures(same, 1, identical_share=share)
        assert "rounded differently" in " ".join(printed(other).split())


def test_a_page_shows_every_method_and_needs_nothing_else() -> None:
    names = ("transformers", "autoregressive", "drafter=mine", "<script>alert(1)</script> $x$ 漢")
    document = make_document(names, (0.0, 0.8), ("chat", "code"), prompts=6)
    page = page_of(document)
    one = document.figures("drafter=mine", 0.8)
    assert f"{one.speedup:.2f} [{one.speedup_low:.2f}, {one.speedup_high:.2f}]" in page
    assert page.lower().startswith("<!doctype html>")
    assert "<svg" in page.partition("<body>")[2]
    assert page.count("&lt;script&gt;") > 2
    assert "<script" not in page
    assert not re.search(r'(src|href)="(?!#)', page)
    assert page_of(document) == page
