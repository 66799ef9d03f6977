"""Which rows a step sees, and with which anchors: a function of the seed and the step alone."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from training.anchors import AnchorRule
from training.batch import Batch
from training.data.packing import PackedRows, RowWithAnchors, collate


class Sampler:
    """Batches for any step, without a state, and for any division among processes.

    Rows come in another order in every epoch, which goes on where the one before ended. A resumed
    run asks for its step and goes on; the rows of a step do not depend on the number of processes.

    Args:
        rows: the packed rows, at least one.
        rows_per_step: rows of an optimizer step, over all processes.
        rule: how anchors are chosen.
        seed: of orders and anchors.
        narrow_steps: first steps in which self-attention sees drafted tokens only.
    """

    def __init__(
        self,
        rows: PackedRows,
        *,
        rows_per_step: int,
        rule: AnchorRule,
        seed: int,
        narrow_steps: int = 0,
    ) -> None:
        self._rows = rows
        self._rows_per_step = rows_per_step
        self._rule = rule
        self._seed = seed
        self._narrow_steps = narrow_steps
        self._order = lru_cache(maxsize=2)(self._draw_order)

    @property
    def num_rows(self) -> int:
        """Number of different rows, the length of an epoch."""
        return len(self._rows)

    def batch(self, step: int, begin: int, end: int) -> Batch:
        """Return the rows from `begin` to `end` of those that the step sees, counted from zero."""
        first = step * self._rows_per_step
        rows = (self._row(index) for index in range(first + begin, first + end))
        return collate(rows, is_narrow=step < self._narrow_steps)

    def _row(self, index: int) -> RowWithAnchors:
        epoch, place = divmod(index, len(self._rows))
        number = int(self._order(epoch)[place])
        row = self._rows.row(number)
        return row, self._rule.anchors(row.document_starts, (self._seed, epoch, number))

    def _draw_order(self, epoch: int) -> npt.NDArray[np.int64]:
        random = np.random.default_rng(np.random.SeedSequence((self._seed, epoch)))
        return random.permutation(len(self._rows))
