"""Sampler of batches, which depend only on the data, the seed and the optimizer step."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from training.data.packing import PackedSequences, SequenceWithAnchors, collate
from training.loss.anchors import AnchorRule
from training.loss.batch import Batch


class Sampler:
    """Stateless sampler of the batches of any optimizer step, for any number of processes.

    The sequences have a different random order in each epoch. A step may begin in one epoch and end
    in the next. The sequences of a step do not depend on earlier steps or on the number of
    processes.

    Args:
        narrow_steps: number of steps, at the start of training, in which self-attention is limited
            to the tokens after the anchor.
        first_number: index of the first sequence in `sequences` among all sequences of the run.
    """

    def __init__(
        self,
        sequences: PackedSequences,
        *,
        sequences_per_step: int,
        rule: AnchorRule,
        seed: int,
        narrow_steps: int = 0,
        first_number: int = 0,
    ) -> None:
        self._sequences = sequences
        self._sequences_per_step = sequences_per_step
        self._rule = rule
        self._seed = seed
        self._narrow_steps = narrow_steps
        self._first_number = first_number
        self._order = lru_cache(maxsize=2)(self._random_order)

    @property
    def num_sequences(self) -> int:
        """The number of different sequences, which is the length of an epoch."""
        return len(self._sequences)

    def batch(self, step: int, begin: int, end: int) -> Batch:
        first, keys = step * self._sequences_per_step, []
        for index in range(first + begin, first + end):  # counted over all steps
            epoch, rank = divmod(index, len(self._sequences))
            keys.append((epoch, int(self._order(epoch)[rank])))
        sequences = (self._with_anchors(epoch, number) for epoch, number in keys)
        batch = collate(sequences, is_narrow=step < self._narrow_steps)
        numbers = torch.tensor([number for _, number in keys])
        return replace(batch, sequence_ids=self._first_number + numbers)

    def first_batches(self, num_tokens: int) -> Iterator[Batch]:
        """Yield the first sequences of training as batches of one, up to a number of tokens.

        Each sequence is yielded at most once.

        Args:
            num_tokens: number of tokens, excluding padding, which the last sequence may exceed. If
                an epoch has fewer tokens, all of its sequences are yielded.
        """
        for index in range(self.num_sequences):
            if num_tokens <= 0:
                return
            step, begin = divmod(index, self._sequences_per_step)
            batch = self.batch(step, begin, begin + 1)
            num_tokens -= int((batch.documents >= 0).sum())
            yield batch

    def micro_batches(self, step: int, size: int, rank: int, count: int) -> list[Batch]:
        """Return a process's micro-batches of a step."""
        begins = range(size * rank, self._sequences_per_step, size * count)
        return [self.batch(step, begin, begin + size) for begin in begins]

    def _with_anchors(self, epoch: int, number: int) -> SequenceWithAnchors:
        sequence = self._sequences.sequence(number)
        key = (self._seed, epoch, number)
        anchors = self._rule.anchors(sequence.document_starts, key, sequence.is_response)
        return sequence, anchors

    def _random_order(self, epoch: int) -> npt.NDArray[np.int64]:
        random = np.random.default_rng(np.random.SeedSequence((self._seed, epoch)))
        return random.permutation(len(self._sequences))
