"""The sampling options of sequences that are decoded together."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from inference.sampling.options import Sampling, processed_draft_of, processed_probs_of
from jakiro.utils.devices import indices_on


class Kind(NamedTuple):
    """Sequences whose options differ at most in their temperatures, seeds and indices."""

    each: tuple[Sampling, ...]  # options of each of these sequences
    indices: tuple[int, ...]  # batch index of each of these sequences


class BatchSampling:
    """The sampling options of each sequence of a batch, which may differ.

    Args:
        temperatures: temperatures that replace those of the options, so that they can change at the
            same address; None for those of the options. The options of all sequences must have the
            same `form`, with at most one temperature.
    """

    def __init__(
        self, each: Sequence[Sampling], temperatures: Float[Tensor, " batch"] | None = None
    ) -> None:
        self.each = tuple(each)
        self.temperatures = temperatures

    @cached_property
    def kinds(self) -> list[Kind]:
        """The sequences whose distributions are processed together, in the order of the batch."""
        alike: dict[object, list[int]] = {}
        for index, sampling in enumerate(self.each):
            alike.setdefault(sampling.form, []).append(index)
        return [
            Kind(tuple(self.each[index] for index in indices), tuple(indices))
            for indices in alike.values()
        ]

    @property
    def processes_drafts(self) -> bool:
        """Whether `processed_draft` may change the draft distributions of any sequence."""
        return self.temperatures is not None or any(
            sampling.processes_drafts for sampling in self.each
        )

    @property
    def quantizes_drafts(self) -> bool:
        """Whether any sequence needs draft distributions of integer weights."""
        return any(sampling.quantizes_drafts for sampling in self.each)

    def processed_draft(
        self, log_probs: Float[Tensor, "batch parents m"]
    ) -> Float[Tensor, "batch parents m"]:
        """Return draft distributions after the processors of each sequence, renormalized."""

        def processed(samplings: Sequence[Sampling], part: Tensor) -> Tensor:
            flat = part.flatten(0, 1)
            return processed_draft_of(samplings, flat, self.temperatures).view_as(part)

        return self._by_kind(processed, log_probs)

    def processed_probs(self, logits: Float[Tensor, "batch vocab"]) -> Float[Tensor, "batch vocab"]:
        """Return probabilities after the processors of each sequence.

        All processors must be prefix-free.
        """
        process = partial(processed_probs_of, temperatures=self.temperatures)
        return self._by_kind(process, logits)

    def of_sequences(self, indices: Sequence[int]) -> "BatchSampling":
        return BatchSampling([self.each[index] for index in indices])

    def __add__(self, other: "BatchSampling") -> "BatchSampling":
        return BatchSampling((*self.each, *other.each))

    def _by_kind(
        self, process: Callable[[Sequence[Sampling], Tensor], Tensor], values: Tensor
    ) -> Tensor:
        """Return the values of every sequence after a function that processes one kind."""
        if len(self.kinds) == 1:
            return process(self.kinds[0].each, values)
        index, parts = [], []
        for samplings, indices in self.kinds:
            index.append(indices_on(values.device, indices))
            parts.append(process(samplings, values[index[-1]]))
        processed = torch.empty_like(values, dtype=parts[0].dtype)
        for members, part in zip(index, parts, strict=True):
            processed.index_copy_(0, members, part)
        return processed
