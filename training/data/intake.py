"""What comes of the rows of data: an unusable one is an error, or is counted and left out."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from jakiro.errors import DataError
from jakiro.logs import get_logger

_SHOWN = 5  # skipped rows that are named; the others are only counted

_logger = get_logger(__name__)


class RowError(DataError):
    """One row cannot be used; the others may be fine."""


@dataclass
class Intake:
    """Counts rows while they are read.

    Attributes:
        is_skipping: leave unusable rows out; by default the first one is raised.
        rows: read so far, unusable ones included.
        skipped: unusable ones.
    """

    is_skipping: bool = False
    rows: int = 0
    skipped: int = 0

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Pass over what is done with an unusable row, if that is wanted.

        Raises:
            RowError: the row is unusable, and rows are not to be skipped.
        """
        try:
            yield
        except RowError as error:
            if not self.is_skipping:
                raise
            self.skipped += 1
            if self.skipped <= _SHOWN:
                _logger.warning(f"skipped: {error}")
