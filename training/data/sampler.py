"""Which rows a step sees, and with which anchors: a function of the seed and the step alone."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from training.data.packing import PackedRows, RowWithAnchors, collate
from training.loss.anchors import AnchorRule
from training.loss.batch import Batch


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
        first_number: of the first row, among all rows of the run.
    """

    def __init__(
        self,
        rows: PackedRows,
        *,
        rows_per_step: int,
        rule: AnchorRule,
        seed: int,
        narrow_steps: int = 0,
        first_number: int = 0,
    ) -> None:
        self._rows = rows
        self._rows_per_step = rows_per_step
        self._rule = rule
        self._seed = seed
        self._narrow_steps = narrow_steps
        self._first_number = first_number
        self._order = lru_cache(maxsize=2)(self._draw_order)

    @property
    def num_rows(self) -> int:
        """Number of different rows, the length of an epoch."""
        return len(self._rows)

    def batch(self, step: int, begin: int, end: int) -> Batch:
        """Return the rows from `begin` to `end` of those that the step sees, counted from zero."""
        first = step * self._rows_per_step
        places = [self._place(index) for index in range(first + begin, first + end)]
        rows = (self._row(epoch, number) for epoch, number in places)
        batch = collate(rows, is_narrow=step < self._narrow_steps)
        numbers = torch.tensor([number for _, number in places])
        return replace(batch, numbers=self._first_number + numbers)

    def first_batches(self, num_tokens: int) -> Iterator[Batch]:
        """Yield the first rows of training one by one, each once, until they have so many tokens.

        Args:
            num_tokens: the last row may exceed it; of a shorter epoch all rows are yielded.
        """
        for index in range(self.num_rows):
            if num_tokens <= 0:
                return
            step, place = divmod(index, self._rows_per_step)
            batch = self.batch(step, place, place + 1)
            num_tokens -= int((batch.documents >= 0).sum())
            yield batch

    def micro_batches(self, step: int, size: int, rank: int, count: int) -> dict[int, Batch]:
        """Return one process's part of a step, by the first of the step's rows.

        Args:
            step: counted from zero.
            size: rows of a micro-batch.
            rank: of the process, from zero; those of all ranks make up the step.
            count: of processes, among which the step's rows can be shared out.
        """
        begins = range(size * rank, self._rows_per_step, size * count)
        return {begin: self.batch(step, begin, begin + size) for begin in begins}

    def sources(self, step: int, begin: int, end: int) -> dict[int, str]:
        """Return the packed rows that `batch` reads, by number, each with what it is made of."""
        first = step * self._rows_per_step
        numbers = [self._place(index)[1] for index in range(first + begin, first + end)]
        return {number: self._rows.describe(number) for number in numbers}

    def _place(self, index: int) -> tuple[int, int]:
        """Return the epoch, and the number of its row at an index that never starts anew."""
        epoch, place = divmod(index, len(self._rows))
        return epoch, int(self._order(epoch)[place])

    def _row(self, epoch: int, number: int) -> RowWithAnchors:
        row = self._rows.row(number)
        return row, self._rule.anchors(row.document_starts, (self._seed, epoch, number))

    def _draw_order(self, epoch: int) -> npt.NDArray[np.int64]:
        random = np.random.default_rng(np.random.SeedSequence((self._seed, epoch)))
        return random.permutation(len(self._rows))
