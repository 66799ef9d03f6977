"""The sampling options of sequences that are decoded together."""

from collections.abc import Sequence
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from inference.sampling.options import Sampling


class BatchSampling:
    """The sampling options of each sequence of a batch, which may differ.

    Args:
        each: options of each sequence, in the order of the batch.
    """

    def __init__(self, each: Sequence[Sampling]) -> None:
        self.each = tuple(each)

    @cached_property
    def groups(self) -> list[tuple[Sampling, list[int]]]:
        """The batch indices of sequences whose tokens are selected in the same way, by group.

        Each group begins with the options of its first sequence.
        """
        alike: dict[object, tuple[Sampling, list[int]]] = {}
        for index, own in enumerate(self.each):
            alike.setdefault(own.description, (own, []))[1].append(index)
        return list(alike.values())

    @property
    def processes_drafts(self) -> bool:
        """Whether `processed_draft` changes the draft distributions of any sequence."""
        return any(sampling.processes_drafts for sampling, _ in self.groups)

    def processed_draft(
        self, log_probs: Float[Tensor, "batch parents m"]
    ) -> Float[Tensor, "batch parents m"]:
        """Return draft distributions after the processors of each sequence, renormalized.

        Args:
            log_probs: draft distributions, as for `Sampling.processed_draft`.
        """
        if len(self.groups) == 1:
            return _processed(self.groups[0][0], log_probs)
        processed = torch.empty_like(log_probs)
        for sampling, indices in self.groups:
            processed[indices] = _processed(sampling, log_probs[indices])
        return processed

    def of_sequences(self, indices: Sequence[int]) -> "BatchSampling":
        """Return the options of the sequences at these batch indices."""
        return BatchSampling([self.each[index] for index in indices])

    def __add__(self, other: "BatchSampling") -> "BatchSampling":
        """Return the options of both batches, one after the other."""
        return BatchSampling((*self.each, *other.each))


def _processed(sampling: Sampling, log_probs: Tensor) -> Tensor:
    return sampling.processed_draft(log_probs.flatten(0, 1)).view_as(log_probs)
