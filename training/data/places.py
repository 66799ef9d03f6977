"""Where documents stand in the data: what messages name, and which documents belong together."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Places:
    """The row of data that each document comes from, in the order of the data.

    Attributes:
        names: of the sources, as messages have them.
        rows: for each document the number of its source, from 0, and that of its line (JSONL) or
            row (others) there, from 1. Of a conversation there may be several documents.
    """

    names: tuple[str, ...]
    rows: npt.NDArray[np.int64]

    @property
    def first_documents(self) -> npt.NDArray[np.int64]:
        """The first document of each row of data."""
        is_other = (self.rows[1:] != self.rows[:-1]).any(axis=1)
        return np.flatnonzero(np.concatenate([[True], is_other]))

    def describe(self, documents: Iterable[int]) -> str:
        """Return where documents stand, such as `chats.jsonl:12, 15`."""
        rows = dict.fromkeys(tuple(self.rows[document].tolist()) for document in documents)
        return ", ".join(
            f"{self.names[source]}:{', '.join(str(number) for _, number in same)}"
            for source, same in groupby(rows, key=lambda row: row[0])
        )
