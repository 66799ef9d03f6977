"""Figures of a load test and their table, and comparisons with the same requests sent alone."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table

from inference.benchmark.document import Quantiles
from inference.benchmark.server.document import (
    Comparisons,
    DeviceSteps,
    Difference,
    LoadDocument,
    LoadFigures,
    RequestRecord,
)
from inference.benchmark.server.plan import Question
from inference.client.answer import ServerAnswer
from inference.client.patience import TOO_MANY_REQUESTS
from jakiro.utils.sequences import common_length
from jakiro.utils.wording import counted

MOST_DIFFERENCES = 20  # largest number of differences that are stored
_SHOWN = 60  # characters of each text

Key = tuple[str, float]  # hash of a prompt, and a temperature

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


def load_figures(
    records: Sequence[RequestRecord], seconds: float, counted_by_parts: int
) -> LoadFigures:
    """Return the figures over all requests.

    Args:
        records: all requests.
        seconds: seconds from the first request to the end of the last.
        counted_by_parts: number of complete answers without usage.
    """
    complete = [record for record in records if record.outcome == "complete"]
    streams = [record for record in complete if record.is_streamed]
    first = [record.to_first for record in records if record.is_streamed]
    tokens = sum(record.tokens for record in complete)
    return LoadFigures(
        seconds=seconds,
        requests=len(records),
        outcomes=dict(Counter(record.outcome for record in records)),
        statuses=_statuses(records),
        errors=dict(Counter(r.error or "none" for r in records if r.outcome == "failed")),
        tokens=tokens,
        tokens_per_second=tokens / seconds if seconds else 0.0,
        counted_by_parts=counted_by_parts,
        time_to_first_token=_quantiles(value for value in first if value is not None),
        between_tokens=_quantiles(
            (record.seconds - record.to_first) / (record.tokens - 1)
            for record in streams
            if record.to_first is not None and record.tokens > 1
        ),
        between_parts=_quantiles(gap for record in streams for gap in record.gaps),
        request_seconds=_quantiles(record.seconds for record in complete),
        accepted=_sum(record.accepted for record in complete),
        rejected=_sum(record.rejected for record in complete),
        refusals=sum(record.refusals for record in records),
        longest_wait=max((record.waited for record in records), default=0.0),
        device=_device_steps(records),
    )


def _device_steps(records: Sequence[RequestRecord]) -> DeviceSteps | None:
    own = [record.device for record in records if record.device is not None]
    if not own:
        return None
    return DeviceSteps(
        **{name: sum(getattr(one, name) for one in own) for name in DeviceSteps.model_fields}
    )


def _statuses(records: Sequence[RequestRecord]) -> dict[str, int]:
    counts = Counter(str(record.status or "none") for record in records)
    counts[str(TOO_MANY_REQUESTS)] += sum(record.refusals for record in records)
    return {status: count for status, count in sorted(counts.items()) if count}


def _quantiles(values: Iterable[float]) -> Quantiles | None:
    found = list(values)
    return Quantiles.of(found) if found else None


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


class AloneAnswers:
    """The answers to requests alone, with which answers under load are compared.

    Args:
        answers: complete answers by question.
    """

    def __init__(self, answers: Mapping[Key, ServerAnswer]) -> None:
        self._answers = answers
        # Whether decoding is greedy -> numbers of all answers and of equal answers.
        self._counts = {True: [0, 0], False: [0, 0]}
        self._differences: list[Difference] = []

    def compare(self, question: Question, answer: ServerAnswer) -> None:
        """Count an answer under load as equal or different.

        Args:
            question: question that was asked.
            answer: complete answer, or the beginning of one that was cut.
        """
        expected = self._answers[question.prompt, question.temperature]
        count = self._counts[question.temperature == 0]
        count[0] += 1
        if _is_equal(expected, answer):
            count[1] += 1
        elif len(self._differences) < MOST_DIFFERENCES:
            self._differences.append(_difference(question, expected.text, answer.text))

    @property
    def comparisons(self) -> Comparisons:
        """The results of all comparisons."""
        (greedy, greedy_equal), (sampled, sampled_equal) = self._counts[True], self._counts[False]
        return Comparisons(
            greedy=greedy,
            greedy_equal=greedy_equal,
            sampled=sampled,
            sampled_equal=sampled_equal,
            differences=tuple(self._differences),
        )


def _is_equal(expected: ServerAnswer, answer: ServerAnswer) -> bool:
    if answer.is_cut:
        return expected.text.startswith(answer.text)
    return (expected.text, expected.finish_reason) == (answer.text, answer.finish_reason)


def _difference(question: Question, alone: str, loaded: str) -> Difference:
    position = common_length(alone, loaded)
    return Difference(
        prompt=question.prompt,
        temperature=question.temperature,
        position=position,
        alone=alone[position : position + _SHOWN],
        loaded=loaded[position : position + _SHOWN],
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
    yield from _steps(document)
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


def _steps(document: LoadDocument) -> Iterator[str]:
    """Yield the decoding steps of clients that draft."""
    device, decided = document.figures.device, document.decided
    if device is None:
        return
    yield (
        f"{counted(device.steps, 'decoding step')} of clients that draft: "
        f"{counted(device.repeats, 'request')} sent again, "
        f"{counted(device.resumes, 'session')} in place of lost ones"
    )
    if decided is not None:
        yield (
            f"the server has decided {counted(decided.decided, 'step')}, and sent "
            f"{counted(decided.replayed, 'verdict')} again"
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
