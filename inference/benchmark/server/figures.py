"""Figures of a load test, and comparisons of its answers with those to the same requests alone."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from inference.benchmark.document import Quantiles
from inference.benchmark.server.document import Comparisons, Difference, LoadFigures, RequestRecord
from inference.benchmark.server.plan import Question
from inference.client.answer import ServerAnswer
from inference.client.patience import TOO_MANY_REQUESTS

MOST_DIFFERENCES = 20  # largest number of differences that are stored
_SHOWN = 60  # characters of each text

Key = tuple[str, float]  # hash of a prompt, and a temperature


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
        self._counts = {True: [0, 0], False: [0, 0]}  # by whether it is greedy: all, equal
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
    pairs = enumerate(zip(alone, loaded, strict=False))
    shorter = min(len(alone), len(loaded))
    position = next((index for index, (a, b) in pairs if a != b), shorter)
    return Difference(
        prompt=question.prompt,
        temperature=question.temperature,
        position=position,
        alone=alone[position : position + _SHOWN],
        loaded=loaded[position : position + _SHOWN],
    )
