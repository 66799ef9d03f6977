"""The figures of a comparison as tables for a terminal."""

from collections.abc import Iterator

from rich import box
from rich.console import RenderableType
from rich.table import Table

from inference.benchmark.document import ComparisonDocument, MethodFigures

_COLUMNS = ("method", "tau", "tok/s", "speed-up [95%]", "first", "same")
LEGEND = (
    "tau: tokens per target forward. tok/s: new tokens over all seconds. first: median "
    "milliseconds to the first token. same: greedy answers equal to those of generate()."
)


def figures_table(document: ComparisonDocument) -> Iterator[RenderableType]:
    """Yield one table per temperature, and what the columns mean."""
    if not document.is_complete:
        yield "interrupted: figures of what all methods had decoded by then"
    for temperature in dict.fromkeys(one.temperature for one in document.methods):
        table = Table(
            title=f"T = {temperature:g}, {document.prompts} prompts; "
            f"speed-up over {document.baseline}",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        for number, name in enumerate(_COLUMNS):
            table.add_column(name, justify="right" if number else "left", no_wrap=True)
        for one in document.methods:
            if one.temperature == temperature:
                table.add_row(*_cells(one))
        yield table
    yield LEGEND


def _cells(one: MethodFigures) -> tuple[str, ...]:
    return (
        one.name,
        f"{one.tau:.2f}",
        f"{one.tokens_per_second:.1f}",
        f"{one.speedup:.2f} [{one.speedup_low:.2f}, {one.speedup_high:.2f}]",
        f"{one.time_to_first_token.p50 * 1e3:.0f}",
        "-" if one.identical_share is None else f"{one.identical_share:.0%}",
    )
