"""Table of the figures of a load test, for a terminal."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table

from inference.benchmark.document import Quantiles
from inference.benchmark.server.document import Comparisons, LoadDocument, LoadFigures
from jakiro.utils.wording import counted

LEGEND = (
    "first: milliseconds to the first part of a streamed text. token: mean milliseconds per token "
    "after the first, by answer. part: milliseconds between two parts, which may contain several "
    "tokens. Only complete answers count as tokens."
)
_SHOWN_DIFFERENCES = 3

_ROWS: tuple[tuple[str, Callable[[LoadFigures], str]], ...] = (
    ("requests", lambda figures: str(figures.requests)),
    ("tokens/s", lambda figures: f"{figures.tokens_per_second:.1f}"),
    ("first, p50 / p95", lambda figures: _milliseconds(figures.time_to_first_token)),
    ("token, p50 / p95", lambda figures: _milliseconds(figures.between_tokens)),
    ("part, p50 / p95", lambda figures: _milliseconds(figures.between_parts)),
    ("answer, p50 / p95", lambda figures: _milliseconds(figures.request_seconds)),
    ("accepted drafts", lambda figures: _share(figures.accepted, figures.tokens)),
)


def load_table(document: LoadDocument) -> Iterator[RenderableType]:
    """Yield a table of the figures, and remarks on errors, differences and what was counted."""
    if not document.is_complete:
        yield "The measurement was interrupted: only requests that have ended are included."
    settings, figures = document.settings, document.figures
    yield f"{document.server.model} at {document.server.url}, {settings.concurrency} at a time"
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("")
    columns = [figures] if document.alone is None else [figures, document.alone]
    for name in ("under load", "alone")[: len(columns)]:
        table.add_column(name, justify="right", no_wrap=True)
    for name, cell in _ROWS:
        table.add_row(name, *map(cell, columns))
    yield table
    if document.speedup is not None:
        yield f"{document.speedup:.2f} times the tokens per second of one request after the other"
    yield from _remarks(figures)
    if document.comparisons is not None:
        yield from _compared(document.comparisons)
    yield LEGEND


def _remarks(figures: LoadFigures) -> Iterator[str]:
    yield "outcomes: " + _listed(figures.outcomes) + "; statuses: " + _listed(figures.statuses)
    for error, count in figures.errors.items():
        yield f"failed {counted(count, 'time')}: {error}"
    if figures.refusals:
        yield (
            f"status 429: {counted(figures.refusals, 'time')}; "
            f"longest wait {figures.longest_wait:.1f} s"
        )
    if figures.counted_by_parts:
        yield (
            f"{counted(figures.counted_by_parts, 'answer')} had no usage: parts of the text were "
            "counted instead of tokens"
        )


def _compared(comparisons: Comparisons) -> Iterator[str]:
    yield (
        f"answers equal to those alone: {comparisons.greedy_equal} of {comparisons.greedy} greedy, "
        f"{comparisons.sampled_equal} of {comparisons.sampled} sampled"
    )
    for found in comparisons.differences[:_SHOWN_DIFFERENCES]:
        yield (
            f"prompt {found.prompt} at temperature {found.temperature:g} differs after "
            f"{counted(found.position, 'character')}: {found.alone!r} alone, {found.loaded!r} "
            "under load"
        )


def _listed(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"


def _milliseconds(quantiles: Quantiles | None) -> str:
    return "-" if quantiles is None else f"{quantiles.p50 * 1e3:.0f} / {quantiles.p95 * 1e3:.0f} ms"


def _share(part: int | None, whole: int) -> str:
    return "-" if part is None or not whole else f"{part / whole:.0%} of tokens"
