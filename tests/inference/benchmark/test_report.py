"""Tables have intervals only where there are enough prompts; the page needs no other file."""

import re
from io import StringIO

import pytest
from helpers.comparisons import dequantized, make_document, with_figures
from rich.console import Console

from inference.benchmark.document import ComparisonDocument
from inference.benchmark.report import figures_table, page_of


def printed(document: ComparisonDocument) -> str:
    stream = StringIO()
    console = Console(file=stream, width=120)
    for part in figures_table(document):
        console.print(part)
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
    other = with_figures(same, 1, identical_to_target=False, identical_share=0.5)
    assert "rounded differently" in " ".join(printed(other).split())


def test_the_dtype_of_the_weights_and_their_origin_are_shown() -> None:
    document = make_document()
    assert "\nWeights of the target: bfloat16.\n" in printed(document)
    line = "\nWeights of the target: bfloat16 (dequantized from a GGUF file).\n"
    assert line in printed(dequantized(document, "5" * 64))


@pytest.mark.parametrize(("load", "is_busy"), [(None, False), (2.0, False), (4.25, True)])
def test_a_busy_machine_is_mentioned(load: float | None, is_busy: bool) -> None:
    document = make_document()
    environment = document.environment.model_copy(update={"load_average": load, "num_cpus": 2})
    shown = " ".join(printed(document.model_copy(update={"environment": environment})).split())
    assert ("Other programs ran" in shown) is is_busy
    assert not is_busy or "load average 4.2 on 2 processors" in shown


def test_a_page_shows_every_method_and_needs_nothing_else() -> None:
    names = ("transformers", "autoregressive", "drafter=mine", "<script>alert(1)</script> $x$ 漢")
    document = make_document(names, (0.0, 0.8), ("chat", "code"), prompts=6)
    document = with_figures(document, 2, notes=("<b>a note</b>",))
    page = page_of(document)
    one = document.figures("drafter=mine", 0.8)
    assert f"<td>{one.speedup:.2f} [{one.speedup_low:.2f}, {one.speedup_high:.2f}]</td>" in page
    assert page.count("&lt;script&gt;") > 2
    assert "<script" not in page
    assert "<b>" not in page
    assert not re.search(r'(src|href)="(?!#)', page)
    assert page_of(document) == page
