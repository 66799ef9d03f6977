"""Which rows a step sees, and with which anchors: a function of the seed and the step alone."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from training.anchors import Anchors, draw_anchors, previous_anchors
from training.batch import Batch
from training.data.packing import PackedRow, PackedRows, RowWithAnchors, collate


class Sampler:
    """Batches for any step, without a state, and for any division among processes.

    Rows come in another order in every epoch, which goes on where the one before ended. A resumed
    run asks for its step and goes on; the rows of a step do not depend on the number of processes.

    Args:
        rows: the packed rows, at least one.
        rows_per_step: rows of an optimizer step, over all processes.
        draws: times that anchors are drawn for a row.
        num_levels: autoregressive levels of the drafter's schedule.
        seed: of orders and anchors.
        anchors: "drafting" draws distances as they occur when drafting, "previous" has 1 always.
    """

    def __init__(
        self,
        rows: PackedRows,
        *,
        rows_per_step: int,
        draws: int,
        num_levels: int,
        seed: int,
        anchors: Anchors = "drafting",
    ) -> None:
        self._rows = rows
        self._rows_per_step = rows_per_step
        self._draws = draws
        self._num_levels = num_levels
        self._seed = seed
        self._anchors = anchors
        self._order = lru_cache(maxsize=2)(self._draw_order)

    @property
    def num_rows(self) -> int:
        """Number of different rows, the length of an epoch."""
        return len(self._rows)

    def batch(self, step: int, begin: int, end: int) -> Batch:
        """Return the rows from `begin` to `end` of those that the step sees, counted from zero."""
        first = step * self._rows_per_step
        return collate(self._row(index) for index in range(first + begin, first + end))

    def _row(self, index: int) -> RowWithAnchors:
        epoch, place = divmod(index, len(self._rows))
        number = int(self._order(epoch)[place])
        row = self._rows.row(number)
        keys = [(self._seed, epoch, number, draw) for draw in range(self._draws)]
        return row, np.stack([self._anchors_of(row, key) for key in keys])

    def _anchors_of(self, row: PackedRow, key: tuple[int, ...]) -> npt.NDArray[np.int64]:
        if self._anchors == "previous":
            return previous_anchors(row.document_starts)
        return draw_anchors(row.document_starts, self._num_levels, key)

    def _draw_order(self, epoch: int) -> npt.NDArray[np.int64]:
        random = np.random.default_rng(np.random.SeedSequence((self._seed, epoch)))
        return random.permutation(len(self._rows))
