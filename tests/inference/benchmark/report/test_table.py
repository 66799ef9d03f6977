"""The table for terminals has intervals only where there are enough prompts for them."""

from io import StringIO

from helpers.comparisons import make_document
from rich.console import Console

from inference.benchmark.document import ComparisonDocument
from inference.benchmark.report.table import figures_table


def printed(document: ComparisonDocument) -> str:
    stream = StringIO()
    Console(file=stream, width=120).print(*figures_table(document))
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
