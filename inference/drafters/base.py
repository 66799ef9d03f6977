"""Base classes of drafters that read only tokens."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int64

from inference.draft_tree import DraftTree
from inference.drafters.candidates import Candidates, to_tree
from inference.protocol import (
    AdaptiveSession,
    Budget,
    Committed,
    Drafter,
    DraftSession,
)
from inference.sampling.grammar import GrammarProcessor
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import StepRandom

Tokens = Int64[np.ndarray, " tokens"]


class TokenProposer(ABC):
    """Proposes continuations of one sequence; only `draft` has to be overridden."""

    def read(self, token_ids: Tokens, num_known: int) -> None:
        """Read the new tokens of a sequence."""

    @abstractmethod
    def draft(self, token_ids: Tokens, num_nodes: int, depth: int) -> Candidates:
        """Return continuations of a sequence."""


class TokenDrafter(Drafter, TokenProposer):
    """A drafter that reads only tokens.

    Subclasses override `draft`, or `new_proposer` if they keep a state for each sequence.
    """

    def __init__(self, version: str, max_nodes: int, max_depth: int) -> None:
        super().__init__()
        self.version = version
        self.bytes_per_token = TokenSession.bytes_per_token
        self._limits = Budget(max_nodes, max_depth)

    @property
    def max_nodes(self) -> int:
        return self._limits.num_nodes

    @property
    def max_depth(self) -> int:
        assert self._limits.depth is not None
        return self._limits.depth

    def draft(self, token_ids: Tokens, num_nodes: int, depth: int) -> Candidates:
        raise NotImplementedError(f"{type(self).__name__} overrides neither draft nor new_proposer")

    def new_proposer(self) -> TokenProposer:
        """Return a new proposer for one sequence; a drafter without a state is its own."""
        return self

    def can_share(self, one: Sampling, other: Sampling) -> bool:
        """Return True, because the candidates do not depend on the sampling options."""
        return True

    def new_session(self, sampling: Sampling, capacity: int, batch: int = 1) -> "TokenSession":
        proposers = [self.new_proposer() for _ in range(batch)]
        return TokenSession(proposers, self._limits, capacity)


class TokenSession(AdaptiveSession):
    """A session that keeps the tokens of each sequence, and one proposer for each sequence."""

    bytes_per_token = 8
    lengths: tuple[int, ...] = ()
    grammars: Sequence[GrammarProcessor | None] = ()

    def __init__(self, proposers: Sequence[TokenProposer], limits: Budget, capacity: int) -> None:
        self.proposers = list(proposers)
        self.limits = limits
        self.lengths = (0,) * len(self.proposers)
        self._tokens = np.zeros((len(self.proposers), capacity + 1), np.int64)
        self._num_read = [0] * len(self.proposers)
        self._device: torch.device | None = None  # None while there are no roots

    def advance(self, committed: Committed) -> None:
        if self._device is not None and committed.base_length == self.lengths:
            return
        starts = committed.starts_after(self.lengths)
        # `Context` calls `reserve` only when the target's cache is full. The capacity of that
        # cache was rounded up, so this buffer may be full earlier.
        self.reserve(max(committed.base_length))
        verified, roots = committed.token_ids.tolist(), committed.root[:, 0].tolist()
        for index, (start, end) in enumerate(zip(starts, committed.base_length, strict=True)):
            self._tokens[index, start:end] = verified[index][: end - start]
            self._tokens[index, end] = roots[index]
        self.lengths, self._device = committed.base_length, committed.root.device
        for index, proposer in enumerate(self.proposers):
            # After steps without drafts, a sequence may have been read to its end already.
            if self._num_read[index] <= self.lengths[index]:
                proposer.read(self.known(index), self._num_read[index])
                self._num_read[index] = self.lengths[index] + 1

    def propose(self, budget: Budget, random: StepRandom) -> DraftTree:
        assert self._device is not None, "advance before propose"
        num_nodes = min(budget.num_nodes, self.limits.num_nodes)
        depths = [limit.depth for limit in (budget, self.limits) if limit.depth is not None]
        proposed = [Candidates.none()] * len(self.proposers)
        if num_nodes >= 1 and min(depths) >= 1:
            indices = range(len(self.proposers))
            proposed = [self.draft_below(index, [], num_nodes, min(depths)) for index in indices]
        return to_tree(proposed, torch.tensor(self.lengths, device=self._device))

    def draft_below(
        self, index: int, path: Sequence[int], num_nodes: int, depth: int
    ) -> Candidates:
        longest = depth if self.limits.depth is None else min(depth, self.limits.depth)
        if min(num_nodes, longest) < 1:
            return Candidates.none()
        context = np.concatenate((self.known(index), np.array(path, np.int64)))
        candidates = self.proposers[index].draft(context, num_nodes, longest)
        grammar = self.grammars[index] if self.grammars else None
        return candidates.allowed_by(grammar, path)

    def on_finished(self, index: int, token_ids: Sequence[int]) -> None:
        """Pass the unread tokens of a complete sequence to the sequence's proposer."""
        tokens = np.array(token_ids, np.int64)
        if len(tokens) > self._num_read[index]:
            self.proposers[index].read(tokens, self._num_read[index])
            self._num_read[index] = len(tokens)

    def constrain(self, grammars: Sequence[GrammarProcessor | None]) -> None:
        self.grammars = grammars

    def rollback(self, length: int) -> None:
        """Discard the tokens from position `length` on, but not what was learned from them."""
        self.lengths = tuple(min(length, former) for former in self.lengths)
        self._num_read = [min(length, count) for count in self._num_read]
        self._device = None

    def select_sequences(self, indices: Sequence[int]) -> None:
        self.proposers = [self.proposers[index] for index in indices]
        self.lengths = tuple(self.lengths[index] for index in indices)
        self._num_read = [self._num_read[index] for index in indices]
        self._tokens = self._tokens[list(indices)]

    def append_sequences(self, other: DraftSession) -> None:
        assert isinstance(other, TokenSession)
        width = max(self._tokens.shape[1], other._tokens.shape[1])
        self._tokens = np.concatenate(
            [_widened(tokens, width) for tokens in (self._tokens, other._tokens)]
        )
        self.proposers += other.proposers
        self.lengths += other.lengths
        self._num_read += other._num_read
        self._device = other._device

    def reserve(self, capacity: int) -> None:
        width = self._tokens.shape[1]
        if capacity >= width:
            self._tokens = _widened(self._tokens, max(capacity + 1, 2 * width))

    def close(self) -> None:
        self._tokens = self._tokens[:, :0]

    def known(self, index: int) -> Tokens:
        """Return the verified tokens of a sequence, and its root."""
        return self._tokens[index, : self.lengths[index] + 1]


def _widened(tokens: np.ndarray, width: int) -> np.ndarray:
    return np.pad(tokens, ((0, 0), (0, width - tokens.shape[1])))
