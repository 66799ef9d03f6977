"""Telling what became of the data; a study of many runs on the same data hears it once."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from jakiro.logs import get_logger
from training.data.counts import DataCounts, PackCounts
from training.data.row_layout import TOLERATED_PADDING

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
    said = advice(counts.packed)
    if said is not None and _is_new(said):
        _logger.warning(said)
    for line in filter(_is_new, counts.lines()):
        _logger.info(line)


def advice(
    packed: PackCounts, split: str = "data.split", row_length: str = "data.row_length"
) -> str | None:
    """Return what to do about padding, if it is a waste.

    Args:
        packed: what was packed.
        split: name of the setting that splits documents, where the user is.
        row_length: name of that of a row's length.
    """
    if packed.padding <= TOLERATED_PADDING:
        return None
    wider = "" if packed.wider_split is None else f"{split} {packed.wider_split}, or "
    return (
        f"{packed.padding:.0%} of what is read is padding: {wider}another {row_length}, such as "
        "twice this one, may waste less"
    )


def _is_new(line: str) -> bool:
    said = _said.get()
    if said is None:
        return True
    is_new = line not in said
    said.add(line)
    return is_new
