"""Tables of figures for a terminal."""

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from inference.benchmark.document import ComparisonDocument, MethodFigures
from inference.benchmark.stats import FEWEST_PROMPTS

COLUMNS = ("method", "tau", "drafts", "tok/s", "speed-up [95%]", "first", "same")
INTERRUPTED = "The measurement was interrupted: only prompts that all methods decoded are included."
LEGEND = (
    "tau: tokens per forward pass of the target. drafts: share of these passes with drafts. tok/s: "
    "new tokens divided by all seconds. first: median milliseconds to the first token. same: share "
    "of greedy answers that equal those of generate()."
)


def table_of(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table whose first column is on the left, and the others on the right."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for number, name in enumerate(columns):  # brackets in a text would be read as markup
        table.add_column(Text(name), justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def figures_table(document: ComparisonDocument) -> Iterator[Table | str]:
    """Yield a note after an interruption, a table for each temperature, and a legend."""
    if not document.is_complete:
        yield INTERRUPTED
    for temperature in dict.fromkeys(method.temperature for method in document.methods):
        yield table_of(
            f"T = {temperature:g}, {document.prompts} prompts; speed-up over {document.baseline}",
            COLUMNS,
            [cells(each) for each in document.methods if each.temperature == temperature],
        )
    yield from notes(document)


def notes(document: ComparisonDocument) -> Iterator[str]:
    """Yield what a reader of the table must know."""
    yield LEGEND
    yield f"Weights of the target: {document.environment.target.weights}."
    if any(method.identical_to_target is False for method in document.methods):
        yield (
            "Answers that differ need not be wrong: when several tokens are computed together, "
            "logits are rounded differently, which can decide between tokens that are almost "
            "equally likely. `jakiro verify` checks that nothing else differs."
        )
    if any(_has_too_few(method) for method in document.methods):
        yield f"Intervals need at least {FEWEST_PROMPTS} prompts."
    load, processors = document.environment.load_average, document.environment.num_cpus
    if load is not None and processors is not None and load > 1.5 * processors:
        yield (
            f"Other programs ran when the measurement started (load average {load:.1f} on "
            f"{processors} processors), so speeds are unreliable."
        )


def cells(figures: MethodFigures) -> tuple[str, ...]:
    """Return the figures of a method as shown in `COLUMNS`."""
    limits = f" [{figures.speedup_low:.2f}, {figures.speedup_high:.2f}]"
    return (
        figures.name,
        f"{figures.tau:.2f}",
        "-" if figures.drafting_share is None else f"{figures.drafting_share:.0%}",
        f"{figures.tokens_per_second:.1f}",
        f"{figures.speedup:.2f}{'' if _has_too_few(figures) else limits}",
        f"{figures.time_to_first_token.p50 * 1e3:.0f}",
        "-" if figures.identical_share is None else f"{figures.identical_share:.0%}",
    )


def _has_too_few(figures: MethodFigures) -> bool:
    return len({sample.group for sample in figures.samples}) < FEWEST_PROMPTS
