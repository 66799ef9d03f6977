"""Base classes of drafters that read tokens alone, and of drafters that wrap another drafter."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from inference.draft_tree import ROOT, DraftTree
from inference.drafters.candidates import Candidates, to_tree
from inference.protocol import (
    AdaptiveDrafter,
    AdaptiveSession,
    Budget,
    Committed,
    Drafter,
    DraftSession,
    EncodedMemory,
    VerifyResult,
    request_counter_of,
)
from inference.sampling import Sampling
from jakiro.target.adapter import StepOutput

Tokens = Int64[np.ndarray, " tokens"]


class TokenProposer(ABC):
    """Proposes continuations of one sequence; all methods but `draft` may be left as they are.

    Attributes:
        reads_logits: whether `read_logits` is to be called.
    """

    reads_logits: bool = False

    def begin(self) -> bool:
        """Begin another request; return whether the sequence must be read again from its start."""
        return False

    def read(self, token_ids: Tokens, num_known: int) -> None:
        """Read a sequence that became longer.

        Args:
            token_ids: all tokens of the sequence.
            num_known: number of tokens that were read before.
        """

    @abstractmethod
    def draft(self, token_ids: Tokens, num_nodes: int, depth: int) -> Candidates:
        """Return continuations of a sequence.

        Args:
            token_ids: all tokens of the sequence.
            num_nodes: largest number of candidates.
            depth: largest number of tokens on a path.
        """

    def read_logits(self, token_ids: Tokens, logits: Float[Tensor, "steps vocab"]) -> None:
        """Read the target's raw logits.

        Args:
            token_ids: tokens of the sequence.
            logits: raw logits after each of the last tokens.
        """


class TokenDrafter(Drafter):
    """A drafter that reads nothing but tokens.

    Subclasses override `draft`; or `new_proposer`, if they keep something for each sequence.

    Args:
        version: name of the drafter.
        max_nodes: largest number of candidates of a tree.
        max_depth: longest path of a tree.
    """

    def __init__(self, version: str, max_nodes: int, max_depth: int) -> None:
        super().__init__()
        self.version = version
        self.bytes_per_token = TokenSession.bytes_per_token
        self._limits = Budget(max_nodes, max_depth)

    @property
    def max_nodes(self) -> int:
        """The largest number of candidates of a tree."""
        return self._limits.num_nodes

    @property
    def max_depth(self) -> int:
        """The longest path of a tree."""
        assert self._limits.depth is not None
        return self._limits.depth

    def draft(self, token_ids: Tokens, num_nodes: int, depth: int) -> Candidates:
        """Return continuations of a sequence.

        Args:
            token_ids: all tokens of the sequence.
            num_nodes: largest number of candidates.
            depth: largest number of tokens on a path.
        """
        raise NotImplementedError(f"{type(self).__name__} overrides neither draft nor new_proposer")

    def new_proposer(self) -> TokenProposer:
        """Return the proposer of one sequence; by default, it calls `draft`."""
        return _Stateless(self)

    def new_session(self, sampling: Sampling, capacity: int, batch: int = 1) -> "TokenSession":
        """Return a session for `batch` sequences of up to `capacity` tokens.

        Args:
            sampling: options by which tokens are selected.
            capacity: number of tokens, the root and a tree included.
            batch: number of sequences.
        """
        proposers = [self.new_proposer() for _ in range(batch)]
        return TokenSession(proposers, self._limits, capacity)


class _Stateless(TokenProposer):
    """Drafts with the drafter itself, which keeps nothing of a sequence."""

    def __init__(self, drafter: TokenDrafter) -> None:
        self._drafter = drafter

    def draft(self, token_ids: Tokens, num_nodes: int, depth: int) -> Candidates:
        """Return the drafter's continuations."""
        return self._drafter.draft(token_ids, num_nodes, depth)


class TokenSession(AdaptiveSession):
    """Tokens of sequences that are decoded together, and one proposer for each of them.

    Args:
        proposers: proposer of each sequence.
        limits: limits of every tree.
        capacity: number of tokens of the longest sequence.
    """

    bytes_per_token = 8
    lengths: tuple[int, ...] = ()

    def __init__(self, proposers: Sequence[TokenProposer], limits: Budget, capacity: int) -> None:
        self.proposers = list(proposers)
        self.limits = limits
        self.lengths = (0,) * len(self.proposers)
        self._tokens = np.zeros((len(self.proposers), capacity + 1), np.int64)
        self._num_read = [0] * len(self.proposers)
        self._device: torch.device | None = None  # None while there are no roots
        self._proposed: list[Candidates] = []
        self._step_id = 0

    def advance(self, committed: Committed) -> None:
        """Take in newly verified tokens and the roots.

        Raises:
            ValueError: tokens are missing between the session and `committed`.
        """
        if self._device is not None and committed.base_length == self.lengths:
            return
        pairs = zip(committed.base_length, committed.num_verified, strict=True)
        starts = tuple(end - count for end, count in pairs)
        if starts != self.lengths:
            raise ValueError(f"session ends at {self.lengths}, the next tokens start at {starts}")
        # A context reserves by the capacity of its cache, which was rounded up.
        self.reserve(max(committed.base_length))
        verified, roots = committed.token_ids.tolist(), committed.root[:, 0].tolist()
        for index, (start, end) in enumerate(zip(starts, committed.base_length, strict=True)):
            self._tokens[index, start:end] = verified[index][: end - start]
            self._tokens[index, end] = roots[index]
        self.lengths, self._device = committed.base_length, committed.root.device
        for index, proposer in enumerate(self.proposers):
            proposer.read(self._known(index), self._num_read[index])
            self._num_read[index] = self.lengths[index] + 1

    def propose(self, budget: Budget, generators: Sequence[torch.Generator]) -> DraftTree:
        """Return deterministic trees below the roots, within the budget.

        Args:
            budget: limits of every tree.
            generators: random generators of sampled trees, one per sequence.
        """
        assert self._device is not None, "advance before propose"
        self._step_id += 1
        num_nodes = min(budget.num_nodes, self.limits.num_nodes)
        depths = [limit.depth for limit in (budget, self.limits) if limit.depth is not None]
        if num_nodes < 1 or min(depths) < 1:
            self._proposed = [Candidates.none()] * len(self.proposers)
        else:
            self._proposed = [
                proposer.draft(self._known(index), num_nodes, min(depths))
                for index, proposer in enumerate(self.proposers)
            ]
        base_length = torch.tensor(self.lengths, device=self._device)
        return to_tree(self._proposed, base_length, self._step_id)

    def on_verified(self, result: VerifyResult) -> None:
        """Give the target's logits along each accepted path to proposers that read logits."""
        if result.base_length != list(self.lengths) or not self._proposed:
            return  # a step without drafts, whose tokens come with the next `advance`
        for index, proposed in enumerate(self._proposed):
            path = result.path[index]
            accepted = proposed.token_ids[path].tolist()
            self.learn(index, accepted, partial(result.logits, index, [ROOT, *path]))

    def draft_below(
        self, index: int, path: Sequence[int], num_nodes: int, depth: int
    ) -> Candidates:
        """Return continuations of a sequence after its root and a path below the root.

        Args:
            index: batch index of the sequence.
            path: tokens after the root.
            num_nodes: largest number of candidates.
            depth: largest number of tokens after the path.
        """
        longest = depth if self.limits.depth is None else min(depth, self.limits.depth)
        if min(num_nodes, longest) < 1:
            return Candidates.none()
        context = np.concatenate((self._known(index), np.array(path, np.int64)))
        return self.proposers[index].draft(context, num_nodes, longest)

    def learn(
        self,
        index: int,
        accepted: Sequence[int],
        logits: Callable[[], Float[Tensor, "steps vocab"]],
    ) -> None:
        """Give a sequence's proposer the target's logits, if it reads logits.

        Args:
            index: batch index of the sequence.
            accepted: accepted tokens after the root.
            logits: returns the logits after the root and after each accepted token.
        """
        if self.proposers[index].reads_logits:
            context = np.concatenate((self._known(index), np.array(accepted, np.int64)))
            self.proposers[index].read_logits(context, logits())

    def on_finished(self, index: int, token_ids: Sequence[int]) -> None:
        """Let a sequence's proposer read the tokens that it has not read yet.

        Args:
            index: batch index of the sequence.
            token_ids: prompt and emitted tokens.
        """
        known = np.array(token_ids, np.int64)
        if len(known) > self._num_read[index]:
            self.proposers[index].read(known, self._num_read[index])
            self._num_read[index] = len(known)

    def rollback(self, length: int) -> None:
        """Discard the tokens from position `length` on, but not what was learned from them."""
        self.lengths = tuple(min(length, own) for own in self.lengths)
        self._num_read = [min(length, count) for count in self._num_read]
        self._device = None

    def select_sequences(self, indices: Sequence[int]) -> None:
        """Keep only the sequences at these batch indices, given in ascending order."""
        self.proposers = [self.proposers[index] for index in indices]
        self.lengths = tuple(self.lengths[index] for index in indices)
        self._num_read = [self._num_read[index] for index in indices]
        self._tokens = self._tokens[list(indices)]
        self._proposed = []

    def set_sampling(self, sampling: Sampling) -> None:
        """Begin another request; candidates do not depend on the way of sampling."""
        for index, proposer in enumerate(self.proposers):
            if proposer.begin():
                self._num_read[index] = 0

    def reserve(self, capacity: int) -> None:
        """Make room for sequences of up to `capacity` tokens."""
        width = self._tokens.shape[1]
        if capacity >= width:
            more = max(capacity + 1, 2 * width) - width
            self._tokens = np.pad(self._tokens, ((0, 0), (0, more)))

    def close(self) -> None:
        """Free the tokens."""
        self._tokens = self._tokens[:, :0]

    def _known(self, index: int) -> Tokens:
        """Return the tokens of a sequence, including its root."""
        return self._tokens[index, : self.lengths[index] + 1]


class DelegatingDrafter(AdaptiveDrafter):
    """A drafter that does everything as another drafter does; subclasses override the rest.

    Args:
        drafter: the other drafter; adaptive or not.
    """

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter
        self.needs = drafter.needs
        self.hidden_states = drafter.hidden_states
        self.version = drafter.version
        self.bytes_per_token = drafter.bytes_per_token
        self.request_counter = request_counter_of(drafter)

    @property
    def max_nodes(self) -> int:
        """The largest number of nodes of a tree."""
        return self.drafter.max_nodes

    @property
    def max_depth(self) -> int:
        """The longest path of a tree."""
        return self.drafter.max_depth

    def new_session(self, sampling: Sampling, capacity: int, batch: int = 1) -> DraftSession:
        """Return a session of the other drafter.

        Args:
            sampling: options by which tokens are selected.
            capacity: number of tokens, the root and a tree included.
            batch: number of sequences.
        """
        return self.drafter.new_session(sampling, capacity, batch)

    def encode_memory(
        self, output: StepOutput, queries: Int[Tensor, "batch queries"] | None = None
    ) -> EncodedMemory:
        """Return the memory of the other drafter.

        Args:
            output: output of the target's forward over the tokens.
            queries: query indices of the tokens in that forward; None for all.
        """
        return self.drafter.encode_memory(output, queries)

    def reset(self) -> None:
        """Reset the other drafter, if it learns from requests."""
        if isinstance(self.drafter, AdaptiveDrafter):
            self.drafter.reset()


class DelegatingSession(AdaptiveSession):
    """A session that does everything as another session does; subclasses override the rest.

    Args:
        session: the other session; adaptive or not.
    """

    def __init__(self, session: DraftSession) -> None:
        self.session = session

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of verified tokens taken in so far, per sequence."""
        return self.session.lengths

    @property
    def is_sampled(self) -> bool:
        """Whether the other session samples its candidates."""
        return self.session.is_sampled

    def advance(self, committed: Committed) -> None:
        """Let the other session take in tokens."""
        self.session.advance(committed)

    def propose(self, budget: Budget, generators: Sequence[torch.Generator]) -> DraftTree:
        """Return the trees of the other session.

        Args:
            budget: limits of every tree.
            generators: random generators of sampled trees, one per sequence.
        """
        return self.session.propose(budget, generators)

    def on_verified(self, result: VerifyResult) -> None:
        """Let the other session learn from a verification, if it is adaptive."""
        if isinstance(self.session, AdaptiveSession):
            self.session.on_verified(result)

    def on_finished(self, index: int, token_ids: Sequence[int]) -> None:
        """Let the other session learn from a complete sequence, if it is adaptive.

        Args:
            index: batch index of the sequence.
            token_ids: prompt and emitted tokens.
        """
        if isinstance(self.session, AdaptiveSession):
            self.session.on_finished(index, token_ids)

    def rollback(self, length: int) -> None:
        """Roll the other session back."""
        self.session.rollback(length)

    def select_sequences(self, indices: Sequence[int]) -> None:
        """Let the other session keep only these sequences."""
        self.session.select_sequences(indices)

    def set_sampling(self, sampling: Sampling) -> None:
        """Let the other session draft for another request."""
        self.session.set_sampling(sampling)

    def reserve(self, capacity: int) -> None:
        """Make room in the other session."""
        self.session.reserve(capacity)

    def close(self) -> None:
        """Close the other session."""
        self.session.close()
