"""Telling what became of the data; a study of many runs on the same data hears it once."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from jakiro.logs import get_logger
from training.data.counts import DataCounts

_logger = get_logger(__name__)
_said: ContextVar[set[str] | None] = ContextVar("what was said of the data", default=None)


@contextmanager
def said_once() -> Iterator[None]:
    """Inside, nothing is said of the data that was said inside before, whichever run says it."""
    token = _said.set(set())
    try:
        yield
    finally:
        _said.reset(token)


def report(counts: DataCounts) -> None:
    """Log what became of the data, and advice if there is any."""
    if counts.advice is not None and _is_new(counts.advice):
        _logger.warning(counts.advice)
    for line in filter(_is_new, counts.lines()):
        _logger.info(line)


def _is_new(line: str) -> bool:
    said = _said.get()
    if said is None:
        return True
    is_new = line not in said
    said.add(line)
    return is_new
