"""The table of changes names what got worse, what cannot be decided, and other differences."""

import re
from io import StringIO

from helpers.comparisons import noisy_document
from rich.console import Console

from inference.benchmark.diff.change import compare_documents
from inference.benchmark.diff.table import show_changes
from inference.benchmark.document import ComparisonDocument

MINE = "drafter=mine"


def _table(before: ComparisonDocument, after: ComparisonDocument, width: int = 120) -> str:
    """Return the table of the changes from one document to another, as it is printed."""
    stream = StringIO()
    show_changes(compare_documents(before, after), Console(file=stream, width=width))
    return stream.getvalue()


def _with_mine(document: ComparisonDocument, **update: object) -> ComparisonDocument:
    """Return a copy of the document with changed figures of the drafter."""
    methods = tuple(
        method.model_copy(update=update) if method.name == MINE else method
        for method in document.methods
    )
    return document.model_copy(update={"methods": methods})


def test_the_table_shows_the_verdicts_of_its_figures() -> None:
    methods = ("autoregressive", "drafter=[red]mine")
    before = noisy_document(seed=0, methods=methods)
    after = noisy_document(seed=1, methods=methods, slowness={methods[1]: 1.25})
    printed = " ".join(_table(before, after).split())
    assert "drafter=[red]mine at T = 0 tau 2.3" in printed  # brackets are not markup
    assert "slower tokens/s" in printed
    assert "drifts with the machine" in printed
    assert "different groups" not in printed


def test_no_heading_and_no_figure_folds_over_a_line_break() -> None:
    methods = (
        "autoregressive",
        "drafter=/a/long/path/of/a/run/that/was/called/something/else,tree=auto",
    )
    before, after = (noisy_document(seed, methods=methods) for seed in (0, 1))
    lines = _table(before, after, width=80).splitlines()
    assert f"{methods[1]} at T = 0" in lines
    assert sum(line.startswith("  tokens/s") and "drifts with" in line for line in lines) == 2
    assert all(len(line) <= 80 for line in lines if methods[1] not in line)


def test_a_method_that_is_no_longer_lossless_is_printed_first() -> None:
    before = noisy_document(seed=0)
    printed = _table(before, _with_mine(before, identical_to_target=False))
    assert printed.startswith("NO LONGER LOSSLESS: the tokens of drafter=mine at T = 0")
    assert "NO LONGER LOSSLESS" not in _table(before, before)


def test_few_prompts_have_dashes_and_one_explanation() -> None:
    before, after = (noisy_document(seed, prompts=4) for seed in (0, 1))
    printed = _table(before, after)
    assert "too few" not in printed
    rows = [line for line in printed.splitlines() if re.match("  [a-z]", line)]
    assert len(rows) == 5
    assert all(re.fullmatch(r"  \S+( +[\d.,]+){3} +-", row) for row in rows)
    assert printed.count("Intervals and verdicts need at least 5 prompts.") == 1


def test_the_ratio_to_a_figure_without_value_is_undefined() -> None:
    document = noisy_document(seed=0)
    samples = tuple(
        sample.model_copy(update={"tokens": 2, "target_forwards": 0})
        for sample in document.figures(MINE, 0.0).samples
    )
    printed = _table(_with_mine(document, samples=samples, tau=0.0), document)
    assert re.search(r"  tau .* undefined", printed)


def test_unpaired_methods_and_those_of_one_document_are_named() -> None:
    before = noisy_document(0, prompts=160, methods=("autoregressive", MINE, "drafter=old"))
    after = noisy_document(0, prompts=160, methods=("autoregressive", MINE, "ngram"), batch=8)
    printed = _table(before, after)
    assert "drafter=mine at T = 0 (the prompts were decoded in different" in printed
    assert "Only before: drafter=old at T = 0" in printed
    assert "Only after: ngram at T = 0" in printed


def test_other_differences_stand_below_the_figures() -> None:
    before = noisy_document(seed=0)
    environment = before.environment.model_copy(update={"threads": 2, "spin_count": None})
    printed = _table(before, before.model_copy(update={"environment": environment}))
    below = printed.partition("  tokens/s")[2]
    assert "threads: 8 before, 2 after" in below
    assert "spin_count: 3000 before, None after" in below
