"""Figures of a load test, from the records of its requests."""

from collections import Counter
from collections.abc import Iterable, Sequence

from inference.benchmark.document import Quantiles
from inference.benchmark.server.document import LoadFigures, RequestRecord
from inference.client.patience import TOO_MANY_REQUESTS


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
