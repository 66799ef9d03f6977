"""The prefill: reading of prompts in chunks, and selection of the first tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from inference.draft_tree import DraftTree
from inference.engine.acceptance import AcceptResult, accept_trees
from inference.engine.context import Context
from inference.engine.request import SequenceState
from inference.sampling.random_numbers import StepRandom


class Prefill:
    """Reads the prompts of sequences that start together.

    Args:
        follows: whether the drafter's session processes each chunk, except the last one, as soon as
            the target has read it; there must be a single sequence.
    """

    def __init__(
        self, context: Context, sequences: Sequence[SequenceState], *, follows: bool = False
    ) -> None:
        self.context = context
        self.sequences = list(sequences)
        pairs = zip(self.sequences, context.lengths, strict=True)
        self._counts = [len(state.token_ids) - length for state, length in pairs]
        self._offset = 0  # number of tokens read from each prompt that has not ended
        self._follows = follows and context.session is not None
        self._features: list[Tensor] = [torch.empty(0)] * len(self._counts)

    @property
    def is_complete(self) -> bool:
        return self._offset >= max(self._counts)

    @property
    def chunk_size(self) -> int:
        """The number of tokens that the next `read_chunk` reads from the longest prompt."""
        return min(self.context.prefill_chunk, max(self._counts) - self._offset)

    def fits(self, num_read: int) -> bool:
        """Return whether the next chunk and other tokens together are at most a full chunk."""
        return num_read == 0 or num_read + self.chunk_size <= self.context.prefill_chunk

    def read_chunk(self) -> None:
        prompts = [state.token_ids for state in self.sequences]
        width = self.chunk_size
        features = self.context.read(prompts, self._offset, width)
        for index, read in enumerate(features):
            if len(read) and self._offset + len(read) == self._counts[index]:
                self._features[index] = read[-1]
        self._offset += width
        if self.is_complete:
            self.context.lengths = [len(ids) for ids in prompts]
        elif self._follows:
            self._catch_up(prompts)

    def select_first(self, sequences: Sequence[SequenceState]) -> list[AcceptResult]:
        """Return the selection of each sequence's first token, which becomes the root.

        Args:
            sequences: the sequences whose prompts were read, or any number of continuations of a
                single prompt, each with its own random numbers.
        """
        logits = self.context.target.logits(torch.stack(self._features)[:, None])
        tree = DraftTree.empty(self.context.base_length)
        groups = [sequences] if len(self._features) > 1 else [[sequence] for sequence in sequences]
        results = []
        for group in groups:
            random = StepRandom([state.stream_key for state in group], logits.device)
            results += accept_trees(tree, logits, group, random).results
        return results

    def _catch_up(self, prompts: Sequence[list[int]]) -> None:
        read, self._offset = self._offset, 0
        self.context.lengths = [length + read for length in self.context.lengths]
        self._counts = [count - read for count in self._counts]
        self.context.catch_up(prompts)
